"""`zeepo.init()` without a model: adopt what trains when it is first used.

A script that only adds one line before its loop has its modules and optimizers by then. At the
first forward of a module that owns parameters of a live optimizer, all such modules and
optimizers are adopted.
"""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from zeepo.config import Options
from zeepo.engine.session import Session
from zeepo.errors import SessionError
from zeepo.launch import launching
from zeepo.planner.plan import Plan


def live_optimizers(models: list[nn.Module] | None = None) -> list[Optimizer]:
    """Optimizers in use, of these models if given, in the order they were made."""
    wanted = None if models is None else {id(p) for m in models for p in m.parameters()}
    found = []
    for obj in gc.get_objects():
        if issubclass(type(obj), Optimizer) and obj.__dict__.get("param_groups"):
            parameters = [p for group in obj.param_groups for p in group["params"]]
            if wanted is None or any(id(p) in wanted for p in parameters):
                found.append(obj)
    return found


def live_models(optimizers: list[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own parameters of these optimizers."""
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    modules = [
        obj
        for obj in gc.get_objects()
        if issubclass(type(obj), nn.Module) and "_modules" in obj.__dict__
    ]
    owners = [m for m in modules if any(id(p) in trained for p in m.parameters())]
    inner = {id(child) for m in owners for child in m.modules() if child is not m}
    return [m for m in owners if id(m) not in inner]


class LateSession(Session):
    """A session that finds its models at their first forward."""

    def __init__(self, options: Options):
        self._options = options
        self._closed = False
        self._is_adopted = False
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        optimizers = live_optimizers()
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        if not any(id(p) in trained for p in module.parameters()):
            return
        self._hook.remove()
        self._is_adopted = True
        try:
            super().__init__(live_models(optimizers), optimizers, self._options)
        except BaseException:  # refused: not to be trained outside the session the next time
            self._is_adopted = self._closed = False
            self._hook = register_module_forward_pre_hook(self._before_forward)
            raise

    def _check_open(self, what: str) -> None:
        super()._check_open(what)
        if not self._is_adopted:
            raise SessionError(
                f"session.{what}: nothing is adopted yet. zeepo.init() without a model waits for "
                "the first forward of a module with parameters in an optimizer."
            )

    @property
    def plan(self) -> Plan:
        """What was decided, once the model is known."""
        self._check_open("plan")
        return super().plan

    def __enter__(self) -> Session:
        return self

    def close(self) -> None:
        self._hook.remove()
        if self._is_adopted:
            super().close()
        launching.stop_slicing()
        self._closed = True
