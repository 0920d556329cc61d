"""One optimizer step, top to bottom.

`optimizer.step()` of an optimizer that zeepo runs does, in this order:

1. the user's step pre-hooks, then the closure if one was given (both by torch's own code);
2. collect which parameters have a gradient, by chunk, and which do not fit that scheme;
3. for each chunk, in the order the next forward needs them: lease parameters, gradients and
   states of one piece after the other, run the user's optimizer on them ([optim/shadow]), note
   what changed;
4. the trace of this step becomes the forecast of the next; the user's step post-hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeepo.chunks.layout import Cut
from zeepo.chunks.store import Chunk
from zeepo.engine.managed import Home, home_of, plain_torch, read_autograd_grad
from zeepo.engine.manager import Manager
from zeepo.engine.states import Piece, States
from zeepo.optim.catalogue import Grain, grain_of, num_states_of
from zeepo.optim.shadow import State, run_on
from zeepo.sabotage import sabotaged


@dataclass(frozen=True)
class Target:
    """One parameter to be updated: its home and the group it is in."""

    home: Home
    group: int


@dataclass(frozen=True)
class Part:
    """A tensor given to the shadow: a cut of a parameter, with its gradient set."""

    target: Target
    cut: Cut
    tensor: Tensor
    state: State

    @property
    def is_whole(self) -> bool:
        return self.cut.numel == self.target.home.plain.numel()

    @property
    def is_last(self) -> bool:
        return self.cut.start + self.cut.numel == self.target.home.plain.numel()


class OptimizerStep:
    """Runs one optimizer of the user's over managed parameters."""

    def __init__(
        self,
        manager: Manager,
        optimizer: Optimizer,
        label: str,
        piece_bytes: int,
        adopt: Callable[[Sequence[Tensor]], None],
    ):
        self.optimizer = optimizer
        self.grain = grain_of(optimizer)
        self._manager = manager
        self._store = manager.store
        self._adopt = adopt
        """Takes in parameters that came with add_param_group."""
        pieces = piece_bytes if self.grain is Grain.ELEMENT else None
        self.states = States(manager, label, pieces)
        self._slots: dict[int, list[Home]] = {}
        self._entries: dict[Tensor, State] = {}

    # -- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Update every parameter that has a gradient."""
        by_chunk, odd = self._collect()
        self._entries = {}
        for number, chunk in enumerate(self._in_order_of_next_use(list(by_chunk))):
            if number == 1 and sabotaged("update.skip"):
                continue
            self._update_chunk(chunk, by_chunk[chunk])
        for target in odd:
            self._update_with_odd_gradient(target)
        self._publish_entries()

    def _entry(self, home: Home) -> State:
        """`optimizer.state[p]`, or what will become it when this step is over."""
        p = home.parameter
        assert p is not None
        if p in self.optimizer.state:
            return self.optimizer.state[p]  # type: ignore[no-any-return]
        return self._entries.setdefault(p, {})

    def _publish_entries(self) -> None:
        """New entries appear in the order of the parameters, as if torch had made them."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if self._entries.get(p):
                    self.optimizer.state[p] = self._entries[p]
        self._entries = {}

    def _collect(self) -> tuple[dict[Chunk, list[Target]], list[Target]]:
        """Parameters with a gradient: by chunk; and those whose gradient is not in a slot."""
        self._adopt([p for group in self.optimizer.param_groups for p in group["params"]])
        by_chunk: dict[Chunk, list[Target]] = {}
        odd: list[Target] = []
        for group_index, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                home = self._manager.home(p)
                assert home is not None
                if self._manager.read_grad(home) is None:
                    continue
                target = Target(home, group_index)
                if home.grad is not None:
                    by_chunk.setdefault(home.chunk, []).append(target)
                else:
                    odd.append(target)
        return by_chunk, odd

    def _in_order_of_next_use(self, chunks: list[Chunk]) -> list[Chunk]:
        order = self._store.trace.first_use_order()
        return sorted(chunks, key=lambda c: (order.get(c.key, len(order)), c.key))

    def _update_chunk(self, chunk: Chunk, targets: list[Target]) -> None:
        wanted = {target.home.index: target for target in targets}
        pieces = self.states.pieces(chunk, self.slots(chunk))
        for target in targets:
            self.states.take_in_all(target.home, self._entry(target.home))
        self.states.settle_wholes(chunk)
        for piece in pieces:
            if any(cut.tensor in wanted for cut in piece.cuts):
                self._update_piece(chunk, piece, wanted)

    def _update_piece(self, chunk: Chunk, piece: Piece, wanted: dict[int, Target]) -> None:
        grads = self._manager.grad_chunks[chunk.key]
        states = self.states.state_chunks(chunk, piece)
        leased = [chunk, grads, *states]
        self._store.lease(leased)
        try:
            parts = [
                self._part(wanted[cut.tensor], piece, cut)
                for cut in piece.cuts
                if cut.tensor in wanted
            ]
            self._store.make_room(self._new_state_bytes(parts))
            if not sabotaged("update.mark"):  # before: an update that raises half-way changed too
                for changed in (chunk, *states):
                    self._store.mark_changed(changed)
            with plain_torch():
                new_states = run_on(
                    self.optimizer,
                    self._groups(parts),
                    {part.tensor: part.state for part in parts if part.state},
                )
            for part in parts:
                self._keep_state(part, piece, new_states.get(part.tensor, {}))
        finally:
            self._store.release(leased)

    # -- its parts --------------------------------------------------------------------------------

    def _part(self, target: Target, piece: Piece, cut: Cut) -> Part:
        """The tensors of one cut, ordinary ones over the leased memory."""
        home = target.home
        grad_home = home_of(home.grad)
        assert grad_home is not None
        visible = self._entry(home)
        is_whole = cut.numel == home.plain.numel()
        with plain_torch():
            if is_whole:
                tensor, grad = home.plain.detach(), grad_home.plain
            else:
                tensor, grad = _run(home.plain, cut), _run(_like(grad_home.plain, home.plain), cut)
            tensor.grad = grad
            state: State = {}
            for name, value in visible.items():
                state[name] = self._state_value(home, piece, cut, name, value, is_whole)
        return Part(target, cut, tensor, state)

    def _state_value(
        self, home: Home, piece: Piece, cut: Cut, name: str, value: Any, is_whole: bool
    ) -> Any:
        value_home = home_of(value)
        if value_home is not None and is_whole:
            return value_home.plain
        if value_home is not None:
            return self.states.part(home, name, piece, cut)
        if isinstance(value, Tensor) and (not is_whole or sabotaged("state.small")):
            return value.clone()  # each cut counts its own step; the last one's is kept
        return value

    def _groups(self, parts: list[Part]) -> list[tuple[dict[str, Any], list[Tensor]]]:
        groups: dict[int, list[Tensor]] = {}
        for part in parts:
            groups.setdefault(part.target.group, []).append(part.tensor)
        return [(self.optimizer.param_groups[i], tensors) for i, tensors in sorted(groups.items())]

    def _new_state_bytes(self, parts: list[Part]) -> int:
        new = [p for p in parts if not any(isinstance(v, Tensor) for v in p.state.values())]
        nbytes = sum(part.tensor.numel() * part.tensor.element_size() for part in new)
        return nbytes * num_states_of(self.optimizer)

    def _keep_state(self, part: Part, piece: Piece, new: State) -> None:
        """Take over what the optimizer created; the rest was changed in place."""
        home = part.target.home
        visible = self._entry(home)
        for name, value in new.items():
            if value is part.state.get(name) and value is not None:
                is_small = home_of(visible.get(name)) is None
                if is_small and part.is_last and not sabotaged("state.small"):
                    visible[name] = value
                continue
            is_large = isinstance(value, Tensor) and value.numel() == part.cut.numel > 1
            if is_large and value.layout is torch.strided:
                taken = self.states.take_in(home, name, piece, part.cut, value)
                if part.is_whole:
                    visible[name] = taken
                elif part.is_last:
                    visible[name] = self.states.whole(home, name)
            elif part.is_last:
                visible[name] = value

    def _update_with_odd_gradient(self, target: Target) -> None:
        """Sparse and differentiable gradients: the whole parameter, as torch would do it."""
        home = target.home
        self.states.pieces(home.chunk, self.slots(home.chunk))
        visible = self._entry(home)
        self.states.take_in_all(home, visible)
        chunks = {v.chunk.key: v.chunk for v in map(home_of, visible.values()) if v is not None}
        leased = [home.chunk, *chunks.values()]
        self._store.lease(leased)
        try:
            with plain_torch():
                tensor = home.plain.detach()
                assert home.parameter is not None
                tensor.grad = read_autograd_grad(home.parameter)
                state = {k: h.plain if (h := home_of(v)) else v for k, v in visible.items()}
                group = self.optimizer.param_groups[target.group]
                states = {tensor: state} if state else {}
                new = run_on(self.optimizer, [(group, [tensor])], states)
            for changed in leased:
                self._store.mark_changed(changed)
        finally:
            self._store.release(leased)
        for name, value in new.get(tensor, {}).items():
            if home_of(visible.get(name)) is None:
                visible[name] = value
        self.states.take_in_all(home, visible)

    def take_in_states(self) -> None:
        """After an optimizer ran its own step: page the state it created."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                home = self._manager.home(p)
                if home is not None and p in self.optimizer.state:
                    self.states.pieces(home.chunk, self.slots(home.chunk))
                    self.states.take_in_all(home, self.optimizer.state[p])

    def slots(self, chunk: Chunk) -> list[Home]:
        """The homes of a PARAM chunk's slots, in order."""
        if chunk.key not in self._slots:
            homes = [h for h in self._manager.homes.values() if h.chunk is chunk]
            self._slots[chunk.key] = sorted(homes, key=lambda h: h.index)
        return self._slots[chunk.key]


def _run(tensor: Tensor, cut: Cut) -> Tensor:
    """A flat run of a tensor's elements in memory order."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), cut.start, (cut.numel,), (1,)
    )


def _like(value: Tensor, other: Tensor) -> Tensor:
    """`value` with its elements in memory in the order of `other`."""
    if value.stride() == other.stride():
        return value
    return torch.empty_strided(other.shape, other.stride(), dtype=value.dtype).copy_(value)
