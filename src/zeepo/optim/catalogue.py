"""What is known about the optimizers of torch: how their update may be taken apart.

Exact classes only: a subclass may do anything, so it runs as an unknown optimizer.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from zeepo.errors import UnsupportedError


class Grain(Enum):
    """The smallest part an optimizer's update can be run on with the same result."""

    ELEMENT = "any run of elements"
    PARAMETER = "whole parameters, one by one"
    WHOLE = "its own step(), on managed tensors"


_NUM_STATES: dict[str, int] = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "ASGD": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}
_BY_PARAMETER: dict[str, int] = {"Adafactor": 1, "Muon": 1, "SparseAdam": 2}
_REFUSED = {"LBFGS": "it works on one vector of all parameters and several gradients of it"}
_UNKNOWN_NUM_STATES = 2


def _torch_name(optimizer: Optimizer) -> str | None:
    """The class's name when it is torch's own, else None."""
    name = type(optimizer).__name__
    return name if type(optimizer) is getattr(torch.optim, name, None) else None


SCALAR_STATES = frozenset(("step", "eta", "mu", "mu_product"))
"""States that are one number for a whole parameter, of optimizers that treat elements alike."""


def grain_of(optimizer: Optimizer) -> Grain:
    """How the update may be cut; UnsupportedError for what cannot be served."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED:
            raise UnsupportedError(
                f"torch.optim.{cls.__name__} cannot train under zeepo: {_REFUSED[cls.__name__]}. "
                "Use an optimizer that updates parameters one by one (AdamW, SGD, Adafactor, ...)."
            )
    name = _torch_name(optimizer)
    if name in _NUM_STATES and not any(g.get("differentiable") for g in optimizer.param_groups):
        return Grain.ELEMENT
    return Grain.PARAMETER if name in _BY_PARAMETER else Grain.WHOLE


_NUM_TEMPORARIES = 2
"""Of the unfused paths: for instance Adam's denominator and the step it divides."""
_FEW_TEMPORARIES = ("Adagrad", "Adamax", "ASGD", "RMSprop", "SGD")
"""One less, so that a changed gradient is among the two."""


def num_states_of(optimizer: Optimizer) -> int:
    """How many tensors of the parameter's size the optimizer keeps for each parameter."""
    name = _torch_name(optimizer) or ""
    states = _NUM_STATES.get(name, _BY_PARAMETER.get(name, _UNKNOWN_NUM_STATES))
    groups = optimizer.param_groups
    if any(group.get("amsgrad") for group in groups):
        states += 1
    if name in ("SGD", "RMSprop") and any(group.get("momentum") for group in groups):
        states += 1
    if name == "RMSprop" and any(group.get("centered") for group in groups):
        states += 1
    return states


def num_temporaries_of(optimizer: Optimizer) -> int:
    """How many tensors of a piece's size the optimizer makes and drops while it updates."""
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return 0
    name = _torch_name(optimizer) or ""
    changes_gradient = any(map(_changes_gradient, groups)) and name not in _FEW_TEMPORARIES
    return _NUM_TEMPORARIES + (name == "Rprop" or changes_gradient)


def _changes_gradient(group: dict[str, Any]) -> bool:
    """Whether the update starts from a changed copy of the gradient."""
    decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
    return bool(group.get("maximize") or decays)
