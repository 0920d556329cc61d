"""What the update of a chunk is made of: parameters, cuts of them, and those that go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeepo.chunks.layout import Cut
from zeepo.engine.managed import Home, home_of
from zeepo.engine.states import Piece
from zeepo.optim.shadow import State


@dataclass
class Target:
    """One parameter to be updated."""

    home: Home
    group: int
    grad: Home
    """Where its gradient is, also when the user has let go of it meanwhile."""
    entry: State
    """`optimizer.state[p]`, or what will become it; a copy when the update waits."""
    counters: State | None = None
    """Scalar states as they are before the update, once those in `entry` are ahead of it."""


@dataclass(frozen=True)
class Part:
    """A tensor given to the shadow: a cut of a parameter, with its gradient set."""

    target: Target
    cut: Cut
    tensor: Tensor
    state: State
    values: Tensor
    """The whole parameter that `tensor` is cut from: its own, or a copy in another order."""
    grads: Tensor
    """The same of its gradient."""
    is_whole: bool
    is_last: bool
    """Of its parameter, none comes after it on this rank."""
    is_shard: bool

    def write_back(self) -> None:
        """What was done to a copy is done to the parameter."""
        if self.is_shard:
            return
        if not self.is_whole and self.values is not self.target.home.plain:
            self.target.home.plain.copy_(self.values)

    def write_grad_back(self) -> None:
        if not self.is_shard and self.grads is not self.target.grad.plain:
            self.target.grad.plain.copy_(self.grads)


@dataclass(frozen=True)
class Batch:
    """Cuts of one piece that are updated together: all have states already, or none has."""

    piece: Piece
    cuts: list[tuple[Target, Cut]]
    has_states: bool


def batches_of(pieces: Sequence[Piece], targets: Sequence[Target]) -> list[Batch]:
    """Of each piece those that have states first, then those that get theirs: room for either."""
    target_of = {target.home.index: target for target in targets}
    batches = []
    for piece in pieces:
        cuts = [(target_of[cut.tensor], cut) for cut in piece.cuts if cut.tensor in target_of]
        for has_states in (True, False):
            some = [(target, cut) for target, cut in cuts if has_states_yet(target) is has_states]
            if some:
                batches.append(Batch(piece, some, has_states))
    return batches


def run_of(tensor: Tensor, cut: Cut) -> Tensor:
    """A flat run of a tensor's elements in memory order."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), cut.start, (cut.numel,), (1,)
    )


def with_strides(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`value` with its elements in memory in the order that `strides` tell."""
    if value.stride() == strides and not value.is_conj() and not value.is_neg():
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def bytes_of(parts: Sequence[Part]) -> int:
    return sum(part.tensor.numel() * part.tensor.element_size() for part in parts)


def grad_version(part: Part) -> int:
    assert part.tensor.grad is not None
    return part.tensor.grad._version


def has_states_yet(target: Target) -> bool:
    return any(home_of(value) is not None for value in target.entry.values())
