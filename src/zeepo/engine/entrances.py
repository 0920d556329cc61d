"""Entrances to C++ code that takes a tensor's memory without dispatching on its class.

While a session is open, a managed tensor that is given to `torch.func.grad`, `vmap` and the like is
leased until the next optimizer step; one exported by `to_dlpack`, as long as the export lives; one
that an `autograd.Function` saved, while its backward runs: somebody's saved-tensor hooks (those of
activation checkpointing) may have made it an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as vmap
import torch.utils.dlpack
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from zeepo.engine.managed import home_of, mark_managed
from zeepo.engine.manager import Manager


def _leasing(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        home = home_of(tensor)
        if home is not None and home.manager is not None:
            home.manager.lease_until_step(home)
        return original(tensor, *args, **kwargs)

    return enter


def _exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    def export(tensor: Any) -> Any:
        return original(tensor) if home_of(tensor) is None else tensor.__dlpack__()

    return export


_ENTRANCES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (eager_transforms, "_wrap_for_grad", _leasing),
    (vmap, "_add_batch_dim", _leasing),
    (torch.utils.dlpack, "to_dlpack", _exporting),
    (torch, "to_dlpack", _exporting),
)


def _watch_saved_tensors(manager: Manager) -> None:
    """`ctx.saved_tensors` is no function of torch's, and what it hands out may be read in C++."""
    base: Any = BackwardCFunction
    inherited = base.saved_tensors

    def saved_tensors(self: Any) -> Any:
        tensors = inherited.__get__(self)
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                continue
            home = manager.parameter_home(tensor.untyped_storage())
            if home is not None and not manager.lease_for_running_function(home):
                mark_managed(tensor, home)  # somebody looks at a graph outside backward
        return tensors

    base.saved_tensors = property(saved_tensors)


def watch_entrances(manager: Manager) -> Callable[[], None]:
    """Watch all of them; returns the function that ends it."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in _ENTRANCES]
    for module, name, watched in _ENTRANCES:
        setattr(module, name, watched(getattr(module, name)))
    _watch_saved_tensors(manager)

    def undo() -> None:
        del BackwardCFunction.saved_tensors  # torch's own is that of its base class
        for module, name, original in originals:
            setattr(module, name, original)

    return undo
