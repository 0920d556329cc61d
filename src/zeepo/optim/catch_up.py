"""Updates that waited, done later: rows without a gradient get the updates they have missed.

An update of elements whose gradient is zero needs nothing but these elements and their states, so
it gives the same bits whenever it is done, as long as they come in order and nobody has looked in
between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeepo.optim.shadow import Recipe, State


@dataclass(frozen=True)
class PastUpdate:
    """What an update did to every element of a parameter."""

    recipe: Recipe
    group: int
    counters: Mapping[str, Any]
    """Scalar states as they were before it."""

    def run_on(self, values: Tensor, grads: Tensor, states: Mapping[str, Tensor]) -> None:
        """Do it to some elements, in place."""
        tensor = values.flatten()
        tensor.grad = grads.flatten()
        given: State = {name: state.flatten() for name, state in states.items()}
        given |= {name: _copy(value) for name, value in self.counters.items()}
        found = self.recipe.run_on({self.group: [tensor]}, {tensor: dict(given)})[tensor]
        for name, state in states.items():
            if found[name] is not given[name]:
                state.copy_(found[name].view_as(state))


def catch_up(
    values: Tensor,
    states: Mapping[str, Tensor],
    num_missed: NDArray[np.int64],
    past: Sequence[PastUpdate],
) -> None:
    """Do to each row the last `num_missed` of the updates, of which it misses fewer and fewer.

    `values` and `states` are contiguous matrices; their rows are sorted, those that miss most come
    first.
    """
    if not len(num_missed) or not num_missed[0]:
        return
    most = int(num_missed[0])
    num_concerned = np.searchsorted(-num_missed, -np.arange(most, 0, -1), side="right")
    grads = torch.zeros_like(values[: int(num_concerned[-1])])
    for update, count in zip(past[len(past) - most :], num_concerned.tolist(), strict=True):
        some = {name: state[:count] for name, state in states.items()}
        update.run_on(values[:count], grads[:count], some)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
