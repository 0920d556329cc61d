"""What is known about the optimizers of torch and of zeepo: how their update may be taken apart.

Exact classes only: a subclass may do anything, so it runs as an unknown optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeepo.errors import UnsupportedError
from zeepo.optim.adagrad import Adagrad
from zeepo.optim.adam import Adam, AdamW
from zeepo.optim.elementwise import MASTER, ElementwiseOptimizer
from zeepo.optim.formats import BLOCKS, PLAIN, Packing, format_named
from zeepo.optim.lion import Lion
from zeepo.optim.sgd import SGD


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
_OWN: tuple[type[Optimizer], ...] = (Adagrad, Adam, AdamW, Lion, SGD)
"""zeepo's: they keep no temporaries, and say themselves how they keep which states."""
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
    if type(optimizer) in _OWN:
        return Grain.ELEMENT
    name = _torch_name(optimizer)
    if name in _NUM_STATES and not any(g.get("differentiable") for g in optimizer.param_groups):
        return Grain.ELEMENT
    return Grain.PARAMETER if name in _BY_PARAMETER else Grain.WHOLE


_NUM_TEMPORARIES = 2
"""Of the unfused paths: for instance Adam's denominator and the step it divides."""
_FEW_TEMPORARIES = ("Adagrad", "Adamax", "ASGD", "RMSprop", "SGD")
"""One less, so that a changed gradient is among the two."""


def num_states_of(optimizer: Optimizer) -> float:
    """The size of the states of a parameter, in multiples of its own; where it is largest."""
    if (own := _own(optimizer)) is not None:
        return max(
            (sum(_own_sizes(own, group, p.dtype)) / p.element_size() for group, p in _samples(own)),
            default=0.0,
        )
    name = _torch_name(optimizer) or ""
    return max((_num_torch_states(name, group) for group in optimizer.param_groups), default=0)


def largest_state_of(optimizer: Optimizer) -> float:
    """The size of the largest state of a parameter, in multiples of its own."""
    if (own := _own(optimizer)) is None:
        return 1.0
    return max(
        (size / p.element_size() for g, p in _samples(own) for size in _own_sizes(own, g, p.dtype)),
        default=0.0,
    )


def count_states(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int:
    """How many large states a parameter of this group and type has after a step."""
    if (own := _own(optimizer)) is not None:
        return len(_own_sizes(own, group, dtype))
    return _num_torch_states(_torch_name(optimizer) or "", group)


def _own(optimizer: Optimizer) -> ElementwiseOptimizer | None:
    if type(optimizer) in _OWN and isinstance(optimizer, ElementwiseOptimizer):
        return optimizer
    return None


def _samples(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """One parameter of each group and type."""
    groups = optimizer.param_groups
    return [(g, p) for g in groups for p in {p.dtype: p for p in g["params"]}.values()]


def _own_sizes(
    optimizer: ElementwiseOptimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> list[float]:
    """Bytes for each element, of each state."""
    names = [name for name in optimizer.state_names(dict(group)) if name is not None]
    sizes = [format_named(group["state_dtype"]).bytes_per_element for _ in names]
    has_master = group["master_weights"] and dtype is torch.bfloat16
    return [*sizes, 4.0] if has_master else sizes


def _num_torch_states(name: str, group: Mapping[str, Any]) -> int:
    states = _NUM_STATES.get(name, _BY_PARAMETER.get(name, _UNKNOWN_NUM_STATES))
    if group.get("amsgrad"):
        states += 1
    if name in ("SGD", "RMSprop") and group.get("momentum"):
        states += 1
    if name == "RMSprop" and group.get("centered"):
        states += 1
    return states


def state_dtype_of(optimizer: Optimizer, p: Tensor | None, name: str) -> torch.dtype | None:
    """The type in which the optimizer keeps a state of a parameter, if it is known beforehand."""
    if (own := _own(optimizer)) is None:
        return None
    for group in own.param_groups:
        if any(p is other for other in group["params"]):
            if name == MASTER:
                return torch.float32
            names = own.state_names(group)
            return format_named(group["state_dtype"]).dtype if name in names else None
    return None


def packing_of(optimizer: Optimizer, dtype: torch.dtype) -> Packing:
    """How many numbers of this type the optimizer keeps in a state for a run of elements."""
    return BLOCKS if _own(optimizer) is not None and dtype is torch.uint8 else PLAIN


def num_temporaries_of(optimizer: Optimizer) -> int:
    """How many tensors of a piece's size the optimizer makes and drops while it updates."""
    groups = optimizer.param_groups
    if _own(optimizer) is not None or all(group.get("fused") for group in groups):
        return 0
    name = _torch_name(optimizer) or ""
    changes_gradient = any(map(_changes_gradient, groups)) and name not in _FEW_TEMPORARIES
    return _NUM_TEMPORARIES + (name == "Rprop" or changes_gradient)


def _changes_gradient(group: dict[str, Any]) -> bool:
    """Whether the update starts from a changed copy of the gradient."""
    decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
    return bool(group.get("maximize") or decays)
