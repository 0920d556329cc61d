"""Putting zeepo's step in the place of `optimizer.step`, on the one object.

The replacement is a bound method made with torch's own hook wrapper, so step hooks fire once per
step and LR schedulers, whether they were made before or after `init`, find what they expect to
patch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from zeepo.engine.step import OptimizerStep
from zeepo.optim.catalogue import Grain
from zeepo.optim.shadow import raw_step


class StepInterception:
    """Intercepts one optimizer's `step` until removed."""

    def __init__(self, step: OptimizerStep, after_step: Callable[[], None]):
        self._step = step
        self._after_step = after_step
        self._is_active = True
        optimizer = step.optimizer
        self._previous = optimizer.__dict__.get("step")
        method = self._make_method()
        if hasattr(self._previous, "_wrapped_by_lr_sched"):
            # A scheduler wrapped step() and warns if its mark is gone; ours notes calls as it did.
            method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._installed = types.MethodType(method, optimizer)
        optimizer.step = self._installed  # type: ignore[method-assign]

    def _make_method(self) -> Callable[..., Any]:
        interception = self

        def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]
            if not interception._is_active:
                return raw_step(type(self))(self, closure, **kwargs)
            if interception._step.grain is Grain.WHOLE:
                return interception._run_own_step(closure, kwargs)
            return interception._run(closure)

        step.__qualname__ = f"{type(self._step.optimizer).__name__}.step"
        hooked: Any = Optimizer.profile_hook_step(step)
        hooked._wrapped_by_lr_sched = True  # schedulers look for it; _opt_called is set above
        return hooked  # type: ignore[no-any-return]

    def _run(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step.run()
        self._after_step()
        return loss

    def _run_own_step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """An optimizer we know nothing of runs its own code; every tensor it touches is managed."""
        optimizer = self._step.optimizer
        if closure is None:
            self._step.begin_own_step()
        arguments = () if closure is None else (closure,)
        loss = raw_step(type(optimizer))(optimizer, *arguments, **kwargs)
        self._step.take_in_states()
        self._step.end_own_step()
        self._after_step()
        return loss

    def remove(self) -> None:
        self._is_active = False
        optimizer = self._step.optimizer
        if optimizer.__dict__.get("step") is not self._installed:
            return  # a scheduler wrapped ours: it goes on to the class's step from now on
        if self._previous is None:
            del optimizer.step
        else:
            optimizer.step = self._previous  # type: ignore[method-assign]
