"""The update of one chunk by the user's optimizer: fixed by `step()`, carried out then or later.

The parameters and gradients of the chunk are leased with the states of one piece after the other,
and a shadow of the optimizer ([optim/shadow]) runs on ordinary tensors over that memory. What an
update needs beside the bytes (hyperparameters, counters) it holds itself, so nothing the user
does to the optimizer afterwards changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from zeepo.chunks.layout import Cut
from zeepo.chunks.store import Chunk
from zeepo.engine.managed import Home, home_of, plain_torch
from zeepo.engine.manager import Manager
from zeepo.engine.states import Piece, States
from zeepo.engine.update_parts import (
    Batch,
    Part,
    Target,
    batches_of,
    bytes_of,
    grad_version,
    run_of,
    with_strides,
)
from zeepo.errors import SessionError
from zeepo.memory.heap import give_back_free_memory
from zeepo.optim.shadow import Recipe, State
from zeepo.sabotage import sabotaged
from zeepo.units import MiB

WORTH_GIVING_BACK = 8 * MiB
"""Freed heap memory that is given back to the system while new states move into their slots."""


class ChunkUpdate:
    """What one step does to one chunk."""

    def __init__(
        self,
        manager: Manager,
        states: States,
        recipe: Recipe,
        chunk: Chunk,
        targets: Sequence[Target],
        num_states: float,
        num_temporaries: int,
    ):
        self.chunk = chunk
        self.targets = list(targets)
        self._recipe = recipe
        self._num_states = num_states
        self._num_temporaries = num_temporaries
        self._manager = manager
        self._store = manager.store
        self._states = states
        self._sharded = manager.sharded_states(chunk)
        self._grads: Chunk | None = manager.grad_chunks[chunk.key]
        self._values: Chunk | None = chunk
        if self._sharded is not None:
            assert self._sharded.grad is not None
            self._grads = self._sharded.grad.shard
            if self._sharded.param is not None:
                self._values = self._sharded.param.shard
        self._torn_by: BaseException | None = None
        """What was raised in the middle of the optimizer's arithmetic."""
        self._batches_left = batches_of(states.pieces(chunk), targets)
        self._num_batches = len(self._batches_left)

    # -- waiting ----------------------------------------------------------------------------------

    def chunks(self) -> list[Chunk]:
        """All whose bytes it reads or changes, and what shows them as one."""
        wholes = self._states.assembled(self.chunk) if self._batches_left else []
        grads = [] if self._grads is None else [self._grads]
        return [*grads, *self._changed_chunks(), *wholes]

    def _changed_chunks(self) -> list[Chunk]:
        """Those it has still to change."""
        pieces = {id(batch.piece): batch.piece for batch in self._batches_left}
        states = [chunk for piece in pieces.values() for chunk in self._states_of(piece)]
        values = [] if self._values is None else [self._values]
        return [*values, *states] if self._batches_left else []

    def can_wait(self) -> bool:
        """Whether nobody could tell that it is not done yet.

        Every state must be in a slot already (a first step makes them), nobody may hold a raw
        address, and something must be on its way from a lower tier for waiting to be of use.
        """
        if self._manager.ranks is not None:
            return False  # others wait for it
        chunks = self.chunks()
        if all(c.home is None for c in chunks) or self.is_held_by_address:
            return False
        return all(map(self._is_complete, self.targets))

    def _is_complete(self, target: Target) -> bool:
        values = list(target.entry.values())
        num_large = sum(home_of(value) is not None for value in values)
        return (
            num_large >= self._states.expected(target.home, self._recipe.groups[target.group])
            and target.home.plain.numel() > 1
            and all(isinstance(v, Tensor) and (home_of(v) or v.numel() == 1) for v in values)
        )

    @property
    def is_held_by_address(self) -> bool:
        """Whether somebody reads or writes what it uses without our knowing when."""
        return any(c.raw_holds for c in self.chunks())

    @property
    def is_torn(self) -> bool:
        """Whether it failed in the middle of the optimizer's arithmetic."""
        return self._torn_by is not None

    @property
    def has_begun(self) -> bool:
        """Whether it has changed something already."""
        return self._torn_by is not None or len(self._batches_left) < self._num_batches

    @property
    def unscales(self) -> bool:
        """Whether it divides the gradients by a scale, in place (GradScaler, fused)."""
        return self._recipe.attributes.get("grad_scale") is not None

    # -- doing ------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Carry it out. After a tier's error it can be run again and goes on where it stopped."""
        if self._torn_by is not None:
            raise SessionError(
                f"the update of {self.chunk.label} was torn by {self._torn_by!r}: its values are "
                "neither those before the step nor those after it. Close the session and go on "
                "from the last checkpoint."
            ) from self._torn_by
        while self._batches_left:
            self._update_batch(self._batches_left[0])
            del self._batches_left[0]
        if self._grads is not None:
            self._manager.gradients.forget_unwanted(self._grads)

    def give_up(self, error: Exception) -> None:
        """It can never be carried out: what it should have changed is lost."""
        for chunk in self.chunks():
            chunk.before_use = None
        self._store.give_up(self._changed_chunks(), error)
        if self._grads is not None:
            self._manager.gradients.forget_unwanted(self._grads)

    def _update_batch(self, batch: Batch) -> None:
        states = self._states_of(batch.piece) if batch.has_states else []
        leased = [c for c in (self._values, self._grads) if c is not None] + states
        self._store.lease(leased)
        try:
            parts = [self._part(target, batch.piece, cut) for target, cut in batch.cuts]
            new_bytes = self._new_state_bytes(parts)
            self._store.make_room(new_bytes)
            passing_bytes = self._num_temporaries * bytes_of(parts)
            if passing_bytes:
                self._store.expect(new_bytes + passing_bytes)
            self._update_parts(batch.piece, parts, states)
        finally:
            self._store.release(leased)
        if new_bytes or (passing_bytes and self._store.is_closing):
            give_back_free_memory()  # the new states were moved into buffers; nobody looks any more

    def _update_parts(self, piece: Piece, parts: list[Part], states: list[Chunk]) -> None:
        """Run the optimizer on parts whose chunks are leased."""
        if not sabotaged("update.mark"):  # before: an update that raises half-way changed too
            for changed in (self._values, *states):
                if changed is not None:
                    self._store.mark_changed(changed)
        tensors: dict[int, list[Tensor]] = {}
        for part in parts:
            tensors.setdefault(part.target.group, []).append(part.tensor)
        with plain_torch():
            versions = [grad_version(part) for part in parts]
            old_states = {part.tensor: part.state for part in parts if part.state}
        try:
            with plain_torch():
                new_states = self._recipe.run_on(tensors, old_states)
                self._write_back(parts, versions)
            self._keep_states(piece, parts, new_states)
        except BaseException as error:  # done in part: it cannot be done again
            self._torn_by = error
            raise

    def _write_back(self, parts: list[Part], versions: list[int]) -> None:
        # Fused kernels that unscale write to the gradient without counting its version.
        writes_grads = self.unscales
        for part, version in zip(parts, versions, strict=True):
            if writes_grads or grad_version(part) != version:
                part.write_grad_back()
                if self._grads is not None:
                    self._store.mark_changed(self._grads)
            part.write_back()

    def _keep_states(
        self, piece: Piece, parts: list[Part], new_states: Mapping[Tensor, State]
    ) -> None:
        freed_bytes = 0
        for part in parts:
            freed_bytes += self._new_state_bytes([part])
            self._keep_state(part, piece, new_states.get(part.tensor, {}))
            if freed_bytes >= WORTH_GIVING_BACK:  # the heap keeps what moved into buffers
                give_back_free_memory()
                freed_bytes = 0

    def _states_of(self, piece: Piece) -> list[Chunk]:
        return self._states.state_chunks(self.chunk, piece)

    def _part(self, target: Target, piece: Piece, cut: Cut) -> Part:
        """The tensors of one cut, ordinary ones over the leased memory."""
        home, grad_home = target.home, target.grad
        is_whole = cut.numel == home.plain.numel() and self._sharded is None
        with plain_torch():
            if self._sharded is not None:
                tensor, grad = (
                    self._shard_run(home, cut, self._values),
                    self._shard_run(home, cut, self._grads),
                )
                values, grads = tensor, grad
            elif is_whole:
                values, grads = home.plain, grad_home.plain
                tensor, grad = values.detach(), grads
            else:
                strides = self._states.strides(home)
                values, grads = with_strides(home.plain, strides), grad_home.plain
                grads = with_strides(grads, strides)
                tensor, grad = run_of(values, cut), run_of(grads, cut)
            tensor.grad = grad
            state: State = {}
            for name, value in target.entry.items():
                state[name] = self._state_value(target, piece, cut, name, value, is_whole)
        is_last = cut.start + cut.numel == home.plain.numel()
        if self._sharded is not None:
            is_last = self._states.is_last_cut(self.chunk, cut)
        is_shard = self._sharded is not None
        return Part(target, cut, tensor, state, values, grads, is_whole, is_last, is_shard)

    def _shard_run(self, home: Home, cut: Cut, chunk: Chunk | None) -> Tensor:
        """A flat run of a parameter, or of its gradient, where this rank keeps it."""
        assert self._sharded is not None
        dtype = home.plain.dtype
        if chunk is None or cut.numel == 0:
            return torch.empty(0, dtype=dtype)
        if chunk is self.chunk:
            return run_of(home.plain, cut)
        slot = self.chunk.layout.slots[home.index]
        start = (slot.offset_bytes - self._sharded.own.low) // dtype.itemsize + cut.start
        storage = chunk.storages[0]
        assert storage is not None
        return torch.empty(0, dtype=dtype).set_(storage, start, (cut.numel,), (1,))

    def _state_value(
        self, target: Target, piece: Piece, cut: Cut, name: str, value: Any, is_whole: bool
    ) -> Any:
        value_home = home_of(value)
        if value_home is not None and is_whole:
            return value_home.plain
        if value_home is not None and cut.numel == 0:
            return torch.empty(0, dtype=value_home.plain.dtype)
        if value_home is not None:
            return self._states.part(target.home, name, piece, cut)
        if target.counters is not None:
            return target.counters[name].clone()
        if isinstance(value, Tensor) and value.numel() == 0 and self._sharded is not None:
            return value.flatten()  # of a parameter without elements
        if isinstance(value, Tensor) and (not is_whole or sabotaged("state.small")):
            return value.clone()  # each cut counts its own step; the last one's is kept
        return value

    def _new_state_bytes(self, parts: list[Part]) -> int:
        new = [p for p in parts if not any(isinstance(v, Tensor) for v in p.state.values())]
        return ceil(bytes_of(new) * self._num_states)

    def _keep_state(self, part: Part, piece: Piece, new: State) -> None:
        """Take over what the optimizer created; the rest was changed in place."""
        if part.target.counters is not None:
            return  # counted by step() already, and nothing is created
        home, visible = part.target.home, part.target.entry
        for name, value in new.items():
            if value is part.state.get(name) and value is not None:
                is_small = home_of(visible.get(name)) is None
                is_small = is_small and _has_shape_of(value, visible.get(name))
                if is_small and part.is_last and not sabotaged("state.small"):
                    visible[name] = value
                continue
            is_large = self._states.is_large(value, part.tensor)
            is_large = is_large and (part.is_shard or home.plain.numel() > 1)
            if is_large and value.layout is torch.strided:
                taken = self._states.take_in(
                    home, name, piece, part.cut, value, is_whole=part.is_whole
                )
                if part.is_whole:
                    visible[name] = taken
                elif part.is_last:
                    visible[name] = self._states.whole(home, name)
            elif part.is_last:
                visible[name] = value


def count_ahead(recipe: Recipe, targets: Sequence[Target]) -> None:
    """Bring the scalar states (`step` and the like) to what they are after the update.

    Scalars do not depend on a gradient's values, so the optimizer is run on tensors without
    elements: the same counting, no arithmetic. What they were before is kept for the update.
    """
    tensors: dict[int, list[Tensor]] = {}
    states: dict[Tensor, State] = {}
    targets_of: dict[Tensor, Target] = {}
    for target in targets:
        tensor, grad = (torch.empty(0, dtype=target.home.plain.dtype) for _ in range(2))
        tensor.grad = grad
        tensors.setdefault(target.group, []).append(tensor)
        targets_of[tensor] = target
        target.counters = {k: v.clone() for k, v in target.entry.items() if home_of(v) is None}
        state = {
            name: _to_count(value) if (home := home_of(value)) is None else home.plain.new_empty(0)
            for name, value in target.entry.items()
        }
        if state:
            states[tensor] = state
    for tensor, new in recipe.run_on(tensors, states).items():
        target = targets_of[tensor]
        if not sabotaged("state.small"):
            target.entry.update({name: new[name] for name in target.counters or ()})
    for target in targets:
        target.entry = dict(target.entry)  # the user may put other states into his


def _to_count(value: Tensor) -> Tensor:
    return value.clone() if sabotaged("state.small") else value


def _has_shape_of(value: Any, other: Any) -> bool:
    return not isinstance(value, Tensor) or value.shape == getattr(other, "shape", None)
