"""Running the user's own optimizer on a part of its parameters, at any time.

A recipe is what an optimizer would do at this moment: its class, attributes and hyperparameters.
A shadow is an object of the same class with these, whose parameter groups and state hold only the
tensors of one chunk. Its raw `step` (without the user's step hooks, which fire once per step and
not once per chunk) therefore computes exactly what the real one would have, also when the user
has changed the hyperparameters since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeepo.sabotage import sabotaged

State = dict[str, Any]


def raw_step(kind: type[Optimizer]) -> Any:
    """The class's step function without the wrapper that fires hooks."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step


@dataclass(frozen=True)
class Recipe:
    """An optimizer's class, attributes and hyperparameters, as they were when it was taken."""

    kind: type[Optimizer]
    attributes: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    """Hyperparameters of each group, without its parameters."""

    @property
    def numbers(self) -> list[Mapping[str, Any]]:
        """What has to be the same on every rank for the parts of an update to fit together."""
        return [*self.groups, {"clip_factor": self.attributes.get("clip_factor")}]

    def is_same_as(self, other: Recipe) -> bool:
        """Whether both have the same hyperparameters."""
        return _is_same(self.numbers, other.numbers)

    def run_on(
        self, tensors: Mapping[int, list[Tensor]], state: Mapping[Tensor, State]
    ) -> dict[Tensor, State]:
        """Update tensors (by group, each with `.grad` set); returns the new state."""
        shadow = object.__new__(self.kind)
        shadow.__dict__.update(self.attributes)
        shadow.__dict__["param_groups"] = [
            {**self.groups[group], "params": tensors[group]} for group in sorted(tensors)
        ]
        held: defaultdict[Tensor, State] = defaultdict(dict)
        held.update(state)
        shadow.__dict__["state"] = held
        raw_step(self.kind)(shadow)
        return dict(held)


def take_recipe(optimizer: Optimizer) -> Recipe:
    """What the optimizer would do now. Numbers kept in tensors (a learning rate) are copied."""
    attributes = {k: v for k, v in optimizer.__dict__.items() if k not in ("param_groups", "state")}
    groups = (
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    )
    return Recipe(type(optimizer), _fixed(attributes), tuple(map(_fixed, groups)))


def _fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _fixed_value(value) for name, value in values.items()}


def _fixed_value(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if sabotaged("recipe.copy") else value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_fixed_value, value))
    return _fixed(value) if type(value) is dict else value


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and bool((a == b).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)
