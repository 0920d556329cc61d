"""Entrances to C++ code that takes a tensor's memory without dispatching on its class.

While a session is open, a managed tensor that is given to `torch.func.grad`, `vmap` and the like is
leased until the next optimizer step; one exported by `to_dlpack`, as long as the export lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as vmap
import torch.utils.dlpack

from zeepo.engine.managed import home_of


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


def watch_entrances() -> Callable[[], None]:
    """Watch all of them; returns the function that ends it."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in _ENTRANCES]
    for module, name, watched in _ENTRANCES:
        setattr(module, name, watched(getattr(module, name)))

    def undo() -> None:
        for module, name, original in originals:
            setattr(module, name, original)

    return undo
