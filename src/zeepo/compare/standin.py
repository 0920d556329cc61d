"""`zeepo` for a program that is trained by torch's DDP: `init` replicates what trains.

The batches are sliced over the ranks as zeepo does it, so that all ways see the same ones. The loss
that the program prints is the mean over the ranks, as under zeepo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.modules.module import register_module_forward_pre_hook

from zeepo.engine.ends_of_backward import EndsOfBackward
from zeepo.engine.late import live_models, live_optimizers
from zeepo.launch import launching
from zeepo.verify.standin import PlainSession, make_zeepo_do_nothing, replace_functions


def make_zeepo_ddp() -> None:
    """Replace the functions of `zeepo` in this process."""
    make_zeepo_do_nothing()
    automatic: list[PlainSession] = []
    opened: list[PlainSession] = []

    def init(*args: Any, **options: Any) -> PlainSession:
        while automatic:
            automatic.pop().close()
        opened.append(_init(*args, **options))
        return opened[-1]

    def close() -> None:
        for session in opened:
            session.close()

    replace_functions({"init": init, "close": close})
    automatic.append(init())  # for a program that never calls it


def _init(model: Any = None, optimizer: Any = None, **options: Any) -> PlainSession:
    assert launching.slices is not None
    launching.slices.install()
    ends = EndsOfBackward(lambda: None, _show_mean)
    ends.install()
    session = _ReplicatedSession(ends)
    given = model if isinstance(model, (list, tuple)) else [model] if model is not None else []
    models = list(given) or live_models(live_optimizers())
    for one in models:
        replicate(one)
    if not models:
        session.hook = register_module_forward_pre_hook(session.before_forward)
    return session


class _ReplicatedSession(PlainSession):
    """Waits for the first forward, as `zeepo.init()` without a model does."""

    def __init__(self, ends: EndsOfBackward):
        super().__init__()
        self._ends = ends
        self.hook: Any = None

    def before_forward(self, module: nn.Module, args: Any) -> None:
        models = live_models(live_optimizers())
        if any(module is inner for model in models for inner in model.modules()):
            self.hook.remove()
            for model in models:
                replicate(model)
                replicate.state(model).forward_pre_hook(model, args, {})  # this forward has begun

    def close(self) -> None:
        if not self.is_closed:
            if self.hook is not None:
                self.hook.remove()
            self._ends.remove()
            launching.stop_slicing()
        super().close()


def _show_mean(roots: Sequence[Tensor]) -> None:
    if len(roots) == 1 and roots[0].numel() == 1:
        with torch.no_grad():
            mean = roots[0].detach().double().clone()
            dist.all_reduce(mean)
            roots[0].data.fill_(float(mean) / dist.get_world_size())
