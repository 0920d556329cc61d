"""Running the user's own optimizer on a part of its parameters.

A shadow is an object of the same class with a copy of the optimizer's attributes, whose parameter
groups and state hold only the tensors of one chunk. Its raw `step` (without the user's step
hooks, which fire once per step and not once per chunk) therefore computes exactly what the real
one would have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]


def raw_step(optimizer: Optimizer) -> Any:
    """The class's step function without the wrapper that fires hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step


def run_on(
    optimizer: Optimizer,
    groups: Sequence[tuple[Mapping[str, Any], list[Tensor]]],
    state: Mapping[Tensor, State],
) -> dict[Tensor, State]:
    """Update `groups` (hyperparameters, tensors with `.grad` set); returns the new state."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__["param_groups"] = [{**group, "params": params} for group, params in groups]
    held: defaultdict[Tensor, State] = defaultdict(dict)
    held.update(state)
    shadow.__dict__["state"] = held
    raw_step(optimizer)(shadow)
    return dict(held)
