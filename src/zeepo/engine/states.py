"""Optimizer state in slots: one STATE chunk per piece of a PARAM chunk and state name.

The user's `optimizer.state[p]` stays the truth about which states there are. Tensors of the
parameter's size are taken into the store and stand there as managed tensors; numbers and small
tensors (`step`) stay as they are. What the user puts there by hand or by `load_state_dict` is
taken in before the next update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeepo.chunks.layout import Cut, Layout, cut_into_pieces, pack
from zeepo.chunks.storages import address, is_exclusive, new_storage, take_memory
from zeepo.chunks.store import Chunk, Kind
from zeepo.chunks.wholes import attach_lower, forget_copy
from zeepo.engine.assembly import Part, PartsTier, RemotePart, RemoteParts
from zeepo.engine.forgetting import forget
from zeepo.engine.managed import (
    Home,
    home_of,
    mark_managed,
    mark_ordinary,
    plain_torch,
    storage_of,
)
from zeepo.engine.manager import Manager
from zeepo.engine.sharded import elements_in
from zeepo.optim.catalogue import SCALAR_STATES, count_states, packing_of, state_dtype_of
from zeepo.optim.formats import PLAIN, Packing
from zeepo.sharding.ranges import Range


@dataclass(frozen=True)
class Piece:
    """A part of a PARAM chunk that is updated at once. Cut.tensor is the slot's index."""

    number: int
    cuts: tuple[Cut, ...]


class States:
    """The paged state of one optimizer."""

    def __init__(self, manager: Manager, optimizer: Optimizer, label: str, piece_bytes: int | None):
        self._manager = manager
        self._optimizer = optimizer
        self._store = manager.store
        self._label = label
        self._piece_bytes = piece_bytes
        """None: parameters must stay whole."""
        self._pieces: dict[int, list[Piece]] = {}
        self._strides: dict[int, list[tuple[int, ...]]] = {}
        self._chunks: dict[int, dict[tuple[int, str], Chunk]] = {}
        """PARAM chunk -> (piece, state name) -> its STATE chunk."""
        self._visible: dict[int, dict[tuple[int, str], Tensor]] = {}
        """PARAM chunk -> (slot, state name) -> the managed tensor the user sees."""
        self._dtypes: dict[tuple[int, int, str], torch.dtype] = {}
        """(PARAM chunk, slot, state name) -> its type."""
        self._versions: dict[int, int] = {}
        """PARAM chunk -> how often its states were offered to the other ranks."""

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """How a PARAM chunk is cut for updates."""
        if chunk.key not in self._pieces:
            homes = self._manager.slots[chunk.key]
            sharded = self._manager.sharded_states(chunk)
            own = Range(0, chunk.layout.nbytes) if sharded is None else sharded.own
            self._pieces[chunk.key] = self._pieces_of(chunk, own)
            self._strides[chunk.key] = [home.plain.stride() for home in homes]
        return self._pieces[chunk.key]

    def _pieces_of(self, chunk: Chunk, part: Range) -> list[Piece]:
        """How the part of a PARAM chunk that a rank updates is cut."""
        homes = self._manager.slots[chunk.key]
        itemsizes = [home.plain.element_size() for home in homes]
        starts, numels = elements_in(part, chunk.layout, itemsizes)
        limit = self._piece_bytes or max(64, chunk.layout.nbytes)
        return [
            Piece(i, tuple(Cut(c.tensor, starts[c.tensor] + c.start, c.numel) for c in cuts))
            for i, cuts in enumerate(cut_into_pieces(numels, itemsizes, limit))
        ]

    def strides(self, home: Home) -> tuple[int, ...]:
        """The order in memory in which a parameter's state is cut, whatever its own is by now."""
        return self._strides[home.chunk.key][home.index]

    def known_chunks(self) -> list[Chunk]:
        """PARAM chunks that have states, in the same order on every rank."""
        return [self._manager.slots[key][0].chunk for key in self._pieces]

    def assembled(self, chunk: Chunk) -> list[Chunk]:
        """Chunks that show cut states of a PARAM chunk as wholes."""
        homes = [home_of(t) for t in self._visible.get(chunk.key, {}).values()]
        return [h.chunk for h in homes if h is not None and isinstance(h.chunk.home, PartsTier)]

    def state_chunks(self, chunk: Chunk, piece: Piece) -> list[Chunk]:
        """The STATE chunks that go with a piece."""
        return [
            state
            for (number, _), state in self._chunks.get(chunk.key, {}).items()
            if number == piece.number and not state.is_empty
        ]

    def is_pageable(self, name: str, value: Any, home: Home) -> bool:
        is_split = self._manager.sharded_states(home.chunk) is not None
        least = 1 if is_split and name not in SCALAR_STATES else 2
        return (
            isinstance(value, Tensor)
            and home_of(value) is None
            and value.layout is torch.strided
            and home.plain.numel() >= least
            and value.numel() == self._packing(value.dtype).numel(home.plain.numel())
            and value.device.type == "cpu"
            and not value.requires_grad
        )

    def is_large(self, value: Any, tensor: Tensor) -> bool:
        """Whether a state that an update made for `tensor` has a slot."""
        if not isinstance(value, Tensor):
            return False
        packing = self._packing(value.dtype)
        if packing is PLAIN:
            return value.shape == tensor.shape
        return value.shape == (packing.numel(tensor.numel()),)

    def expected(self, home: Home, group: Mapping[str, Any]) -> int:
        """How many states of a parameter have slots after an update."""
        return count_states(self._optimizer, group, home.plain.dtype)

    def _packing(self, dtype: torch.dtype) -> Packing:
        return packing_of(self._optimizer, dtype)

    # -- taking in ------------------------------------------

    def take_in_all(self, home: Home, visible: dict[str, Any]) -> None:
        """Take in what stands in `optimizer.state[p]` and is not ours yet; drop what left it."""
        for name in list(visible):
            if self.is_pageable(name, visible[name], home):
                visible[name] = self._take_in_whole(home, name, visible[name])
        known = self._visible.get(home.chunk.key, {})
        for index, name in list(known):
            if index == home.index and visible.get(name) is not known[index, name]:
                self._forget(name, home)

    def _take_in_whole(self, home: Home, name: str, value: Tensor) -> Tensor:
        self._forget(name, home)
        pieces = [p for p in self.pieces(home.chunk) if _cuts_of(p, home.index)]
        if len(pieces) == 1 and self._manager.sharded_states(home.chunk) is None:
            cut = _cuts_of(pieces[0], home.index)[0]
            return self.take_in(home, name, pieces[0], cut, value, is_whole=True)
        with torch.no_grad(), plain_torch():
            packing = self._packing(value.dtype)
            flat = _flat(value, self.strides(home)) if packing is PLAIN else value.flatten()
            for piece in pieces:
                for cut in _cuts_of(piece, home.index):
                    low, high = packing.numel(cut.start), packing.numel(cut.start + cut.numel)
                    part = flat[low:high].clone()
                    self.take_in(home, name, piece, cut, part, is_whole=False)
        return self.whole(home, name)

    def is_last_cut(self, chunk: Chunk, cut: Cut) -> bool:
        """Whether no later part of the same parameter is updated by this rank."""
        cuts = [c for piece in self.pieces(chunk) for c in piece.cuts if c.tensor == cut.tensor]
        return cuts[-1] is cut

    def take_in(
        self, home: Home, name: str, piece: Piece, cut: Cut, value: Tensor, *, is_whole: bool
    ) -> Tensor:
        """Put a new state tensor (whole, or flat for a cut) into its slot."""
        with torch.no_grad(), plain_torch():
            if not is_exclusive(value):
                value = value.detach().clone(memory_format=torch.preserve_format)
        chunk = self._chunk(home, name, piece, value.dtype)
        index = next(i for i, c in enumerate(piece.cuts) if c is cut)
        if chunk.layout.slots[index].nbytes != value.numel() * value.element_size():
            return value  # another dtype than the first one seen: it stays in RAM, as it is
        storage = value.untyped_storage()
        self._dtypes[home.chunk.key, home.index, name] = value.dtype
        self._drop_part(chunk, index)
        self._store.adopt(chunk, index, storage)
        self._manager.by_storage[address(storage)] = chunk
        label = f"{home.name}.{name}"
        if is_whole:
            state_home = Home(self._manager, chunk, index, label, value.detach())
            mark_managed(value, state_home)
            self._visible.setdefault(home.chunk.key, {})[home.index, name] = value
        return value

    def _chunk(self, home: Home, name: str, piece: Piece, dtype: torch.dtype) -> Chunk:
        chunks = self._chunks.setdefault(home.chunk.key, {})
        if (piece.number, name) not in chunks:
            layout = self._layout(home, name, piece, dtype)
            label = self._chunk_label(home.chunk, name, piece)
            chunks[piece.number, name] = self._manager.new_state_chunk(label, layout)
        return chunks[piece.number, name]

    def _layout(self, home: Home, name: str, piece: Piece, dtype: torch.dtype) -> Layout:
        """Of a state that has this type for one parameter: that parameter's own, as torch makes
        them, and then each of the others has its own too; unless the optimizer tells."""
        homes = self._manager.slots[home.chunk.key]
        slots = home.chunk.layout.slots
        is_own = dtype == home.plain.dtype
        sizes = []
        for cut in piece.cuts:
            other = homes[cut.tensor]
            told = state_dtype_of(self._optimizer, other.parameter, name)
            kept = told or (other.plain.dtype if is_own else dtype)
            nbytes = self._packing(kept).numel(cut.numel) * kept.itemsize
            sizes.append((f"{slots[cut.tensor].name}.{name}", nbytes))
        return pack(sizes)

    def _chunk_label(self, chunk: Chunk, name: str, piece: Piece) -> str:
        label = f"{chunk.label}.{self._label}.{name}"
        return f"{label}[{piece.number}]" if piece.number else label

    # -- parts of a large parameter ------------------------------------------

    def part(self, home: Home, name: str, piece: Piece, cut: Cut) -> Tensor | None:
        """A flat ordinary tensor over a cut's state (chunk leased); None if there is none."""
        chunk = self._chunks.get(home.chunk.key, {}).get((piece.number, name))
        if chunk is None:
            return None
        storage = chunk.storages[next(i for i, c in enumerate(piece.cuts) if c is cut)]
        if storage is None:
            return None
        dtype = self._dtypes[home.chunk.key, home.index, name]
        numel = self._packing(dtype).numel(cut.numel)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))

    def place(self, home: Home, name: str, piece: Piece, cut: Cut) -> tuple[Chunk, int]:
        """The chunk of a cut's state, and its slot there."""
        chunk = self._chunks[home.chunk.key][piece.number, name]
        return chunk, next(i for i, c in enumerate(piece.cuts) if c is cut)

    def dtype(self, home: Home, name: str) -> torch.dtype:
        """Of a state that is in slots."""
        return self._dtypes[home.chunk.key, home.index, name]

    def whole(self, home: Home, name: str) -> Tensor:
        """The managed tensor that shows all pieces of a state as one."""
        visible = self._visible.setdefault(home.chunk.key, {})
        if (home.index, name) in visible:
            return visible[home.index, name]
        parts = []
        dtype = self._dtypes.get((home.chunk.key, home.index, name), home.plain.dtype)
        packing = self._packing(dtype)
        for piece in self.pieces(home.chunk):
            for index, cut in enumerate(piece.cuts):
                if cut.tensor == home.index and cut.numel:
                    chunk = self._chunks[home.chunk.key][piece.number, name]
                    nbytes = chunk.layout.slots[index].nbytes
                    at = packing.numel(cut.start) * dtype.itemsize
                    parts.append(Part(chunk, index, at, nbytes))
        numel = packing.numel(home.plain.numel())
        shape, strides = home.plain.shape, self.strides(home)
        if packing is not PLAIN:
            shape, strides = torch.Size((numel,)), (1,)
        total = numel * dtype.itemsize
        label = f"{home.name}.{name}"
        tier = PartsTier(self._store, parts, self._remote_parts(home, name, dtype))
        chunk = self._store.create(Kind.STATE, label, pack([(label, total)]), tier)
        chunk.may_be_prefetched = False
        with plain_torch():
            shell = torch.empty(0, dtype=dtype)
            storage = new_storage(0)
            value = shell.set_(storage, 0, shape, strides)
            storage = value.untyped_storage()
        take_memory(storage)
        attach_lower(chunk, 0, storage)
        self._manager.by_storage[address(storage)] = chunk
        mark_managed(value, Home(self._manager, chunk, 0, label, value.detach()))
        visible[home.index, name] = value
        return value

    def _remote_parts(self, home: Home, name: str, dtype: torch.dtype) -> RemoteParts | None:
        """What other ranks have of a state: they cut their ranges as we cut ours."""
        sharded = self._manager.sharded_states(home.chunk)
        ranks = self._manager.ranks
        if sharded is None or ranks is None:
            return None
        parts = []
        for rank in ranks.network.peers:
            for piece in self._pieces_of(home.chunk, sharded.ranges[rank]):
                layout = self._layout(home, name, piece, dtype)
                for slot, cut in zip(layout.slots, piece.cuts, strict=True):
                    if cut.tensor == home.index and cut.numel:
                        label = self._chunk_label(home.chunk, name, piece)
                        at = self._packing(dtype).numel(cut.start) * dtype.itemsize
                        parts.append(RemotePart(rank, label, slot.offset_bytes, slot.end_bytes, at))
        return RemoteParts(ranks.network, lambda: self._versions[home.chunk.key], parts)

    def offer_to_ranks(self, chunk: Chunk) -> None:
        """After an update, or at init: other ranks may have the new states."""
        sharded, ranks = self._manager.sharded_states(chunk), self._manager.ranks
        if sharded is None or ranks is None:
            return
        version = self._versions[chunk.key] = self._versions.get(chunk.key, 0) + 1
        for state in self._chunks.get(chunk.key, {}).values():
            ranks.offers.offer(Kind.STATE, state.label, version, state)
        for whole in self.assembled(chunk):
            forget_copy(self._store, whole)

    def settle_wholes(self, chunk: Chunk) -> None:
        """Before pieces change: what the user wrote into an assembled whole goes to its pieces."""
        for whole in self.assembled(chunk):
            self._store.evict(whole)

    # -- letting go ------------------------------------------

    def _forget(self, name: str, home: Home) -> None:
        tensor = self._visible.get(home.chunk.key, {}).pop((home.index, name), None)
        if tensor is None:
            return
        tensor_home = home_of(tensor)
        was_whole = tensor_home is not None and isinstance(tensor_home.chunk.home, PartsTier)
        self._manager.by_storage.pop(address(storage_of(tensor)), None)
        forget(self._store, tensor)
        if was_whole:
            chunks = self._chunks.get(home.chunk.key, {})
            for piece in self._pieces[home.chunk.key]:
                for index, cut in enumerate(piece.cuts):
                    chunk = chunks.get((piece.number, name))
                    if chunk is not None and cut.tensor == home.index:
                        self._drop_part(chunk, index)

    def _drop_part(self, chunk: Chunk, index: int) -> None:
        storage = chunk.storages[index]
        if storage is not None:
            self._manager.by_storage.pop(address(storage), None)
            self._store.drop(chunk, index)

    def give_back(self) -> None:
        """Every state becomes an ordinary tensor with its current values."""
        for tensor in [t for states in self._visible.values() for t in states.values()]:
            home = home_of(tensor)
            if home is not None:
                self._store.free_from_store(home.chunk, home.index)
                home.manager = None
                mark_ordinary(tensor)
        self._visible.clear()


def _cuts_of(piece: Piece, slot: int) -> list[Cut]:
    return [cut for cut in piece.cuts if cut.tensor == slot]


def _flat(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements in the order that `strides` tell."""
    if value.stride() != strides:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)
    return value.as_strided((value.numel(),), (1,))
