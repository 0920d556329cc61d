"""The ranks of a session: what they agree on, and when.

A stage is a threshold ([Stages]): what is split over the ranks. Everything a rank has to know of
the others it learns at three places, each a short exchange of facts:

- at the end of every backward: which parameters got a gradient, and where. The gradients are then
  reduced: every rank takes the others' contributions to the range it owns and adds them in the
  order of the ranks, so neither stage nor tier nor timing can change a bit.
- at `optimizer.step()`: that all are there. No rank changes a value before.
- at init and close.

In between ranks go their own ways: [sharding/network] answers for them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from zeepo.chunks.layout import Layout, pack
from zeepo.chunks.storages import memory_of, new_storage
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.engine.managed import Home
from zeepo.engine.shards import (
    KIND_NAMES,
    KINDS,
    GatherTier,
    Offers,
    copy_into,
    cut_out,
    key_of,
)
from zeepo.errors import RankError
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Tier
from zeepo.sharding.network import Network, PeerFuture, Wanted
from zeepo.sharding.ranges import Range, split

PATIENCE_SECONDS = 60.0


class Subject(IntEnum):
    """What facts are about."""

    START = 1
    VALUES = 2
    BACKWARD = 3
    STEP = 4
    CHANGE = 5
    NORM = 6
    CLOSE = 7


@dataclass(frozen=True)
class Stages:
    """What is split over the ranks."""

    stage: int

    def splits(self, kind: Kind) -> bool:
        return self.stage >= {Kind.STATE: 1, Kind.GRAD: 2, Kind.PARAM: 3}[kind]


class Sharded:
    """One PARAM chunk and what goes with it on all ranks."""

    def __init__(self, whole: Chunk, ranges: Sequence[Range], rank: int):
        self.whole = whole
        self.ranges = ranges
        self.own = ranges[rank]
        self.version = 0
        """How often it was updated; the same on every rank."""
        self.param: GatherTier | None = None
        """Where the whole comes from, when parameters are split."""
        self.contribution: Chunk | None = None
        """What backward made here and is not reduced yet."""
        self.grad: GatherTier | None = None
        """Where the whole reduced gradient comes from."""

    @property
    def label(self) -> str:
        return self.whole.label


def elements_in(
    part: Range, layout: Layout, itemsizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Of each slot, where the elements that lie in a range begin and how many they are."""
    starts, numels = [], []
    for slot, itemsize in zip(layout.slots, itemsizes, strict=True):
        inside = part.intersect(slot.offset_bytes, slot.end_bytes)
        starts.append((inside.low - slot.offset_bytes) // itemsize if inside.nbytes else 0)
        numels.append(inside.nbytes // itemsize)
    return starts, numels


class Ranks:
    """All ranks, seen from this one."""

    def __init__(self, store: ChunkStore, stage: int, tiers: dict[Kind, Tier | None]):
        self.stages = Stages(stage)
        self._store = store
        self._tiers = tiers
        group = dist.new_group(backend="gloo")
        self.network = Network(group, store.lock, PATIENCE_SECONDS, KIND_NAMES)
        self.offers = Offers(store, self.network)
        self.rank, self.num_ranks = self.network.rank, self.network.num_ranks
        self.sharded: dict[int, Sharded] = {}
        """By the key of the PARAM chunk."""
        self.by_grad_chunk: dict[int, Sharded] = {}
        """By the key of the chunk of whole gradients."""
        self.slots: Mapping[int, Sequence[Home]] = {}
        """The manager's: by the key of the PARAM chunk, the parameters in it."""
        self.num_steps = 0
        self.num_backwards = 0
        self._num_exchanges = 0
        self.is_local = 0
        """How many `no_sync` blocks we are in."""
        self._staging: Buffer | None = None
        self.network.meet(Subject.START)

    # -- at init ----------------------------------------------------------------------------------

    def add(self, whole: Chunk) -> Sharded:
        """Agree on the values of a PARAM chunk, and split it if parameters are split."""
        ranges = split(whole.layout.nbytes, [1.0] * self.num_ranks)
        sharded = Sharded(whole, ranges, self.rank)
        self.sharded[whole.key] = sharded
        self._agree_on_values(whole)
        if self.stages.splits(Kind.PARAM):
            sharded.param = tier = self._tier(Kind.PARAM, sharded, whole.label)
            tier.shard = self._new_shard(Kind.PARAM, sharded, tier)
            if tier.shard is not None:
                self._store.lease([whole])
                try:
                    self.fill_shard(tier, whole)
                finally:
                    self._store.release([whole])
                self.offers.offer(Kind.PARAM, whole.label, 0, tier.shard, sharded.own.low)
            self._store.rest_on(whole, tier)
        return sharded

    def take_staging(self, nbytes: int) -> None:
        """Room in which what others ask for is read from disk: the largest chunk's size."""
        if all(tier is None for tier in self._tiers.values()):
            return
        self._staging = self._store.pool.acquire(nbytes, "staging")
        self.offers.use_staging(self._staging.memory)

    def _tier(self, kind: Kind, sharded: Sharded, label: str) -> GatherTier:
        return GatherTier(self._store, self.network, kind, label, sharded.ranges)

    def _new_shard(self, kind: Kind, sharded: Sharded, tier: GatherTier) -> Chunk | None:
        if not sharded.own.nbytes:
            return None
        label = f"{tier.label}[rank {self.rank}]"
        shard = self._store.create(kind, label, pack([(label, sharded.own.nbytes)]), self._tiers[kind])
        shard.is_part = True
        return shard

    def fill_shard(self, tier: GatherTier, whole: Chunk) -> None:
        """Copy our range of a resident whole into the shard."""
        assert tier.shard is not None
        self._store.adopt(tier.shard, 0, new_storage(tier.shard.layout.nbytes), copy=True)
        tier.write_to_shard(whole.pieces())

    def _agree_on_values(self, whole: Chunk) -> None:
        """Rank 0's initial values are everybody's."""
        self._store.lease([whole])
        try:
            hasher = xxhash.xxh3_128()
            for _, memory in whole.pieces():
                hasher.update(memory)
            label = whole.label
            self.offers.offer(Kind.PARAM, f"{label} at init", 0, whole)
            number = len(self.sharded)
            digests = self.network.collect(Subject.VALUES, 2 * number, hasher.digest(), label)
            if self.rank and digests[self.rank] != digests[0]:
                for slot, storage in whole.present():
                    place = whole.layout.slots[slot]
                    future = PeerFuture(self.network, f"initial values of {label}", 1)
                    wanted = Wanted(
                        KINDS[Kind.PARAM],
                        key_of(f"{label} at init"),
                        0,
                        place.offset_bytes,
                        place.end_bytes,
                    )
                    self.network.pull(0, wanted, memory_of(storage), future)
                    future.result()
                self._store.mark_changed(whole)
            self.network.collect(Subject.VALUES, 2 * number + 1, b"", label)
            self.offers.withdraw(Kind.PARAM, f"{label} at init")
        finally:
            self._store.release([whole])

    # -- backward ---------------------------------------------------------------------------------

    @contextmanager
    def local(self) -> Iterator[None]:
        """Gradients are added up here only; the next backward outside reduces the sum."""
        self.is_local += 1
        try:
            yield
        finally:
            self.is_local -= 1

    def contribution_chunk(self, whole: Chunk) -> Chunk:
        """Where backward's gradients for a PARAM chunk are collected."""
        sharded = self.sharded[whole.key]
        if sharded.contribution is None:
            sharded.contribution = self._store.create(
                Kind.GRAD, f"{whole.label}.contribution", whole.layout, self._tiers[Kind.GRAD]
            )
            sharded.contribution.is_part = True
        return sharded.contribution

    def agree_on_gradients(self) -> dict[int, list[set[int]]]:
        """PARAM chunk -> on each rank, the slots that got a gradient in this backward."""
        mine = b"".join(
            bytes(storage is not None for storage in sharded.contribution.storages)
            if sharded.contribution is not None
            else bytes(len(sharded.whole.layout.slots))
            for sharded in self.sharded.values()
        )
        self.num_backwards += 1
        self.network.position = (self.num_steps, 2)
        told = self.network.collect(
            Subject.BACKWARD, self.num_backwards, mine, "the end of backward"
        )
        lengths = {len(fact) for fact in told}
        if len(lengths) > 1:
            raise RankError(f"the ranks' models differ: {sorted(lengths)} parameters.")
        found: dict[int, list[set[int]]] = {}
        at = 0
        for key, sharded in self.sharded.items():
            count = len(sharded.whole.layout.slots)
            found[key] = [{i for i in range(count) if fact[at + i]} for fact in told]
            at += count
        return found

    def reduce(
        self,
        key: int,
        present: Sequence[set[int]],
        dtypes: Sequence[torch.dtype],
        kept: set[int],
    ) -> None:
        """Add the ranks' contributions to our range, in the order of the ranks.

        `kept`: slots whose gradient of earlier backwards is to be added to.
        """
        sharded = self.sharded[key]
        number = self.num_backwards
        label = f"{sharded.label}.contribution"
        contribution = sharded.contribution
        if contribution is not None and present[self.rank]:
            self.offers.offer(Kind.GRAD, label, number, contribution)
        total = self._sum(sharded, present, dtypes, label) if sharded.own.nbytes else None
        if total is not None:
            self._accumulate(sharded, total, dtypes, kept)
        self.gradient_changed(sharded)

    def _sum(
        self, sharded: Sharded, present: Sequence[set[int]], dtypes: Sequence[torch.dtype], label: str
    ) -> Tensor:
        """The mean of the contributions to our range, as flat bytes."""
        own = sharded.own
        total: Tensor | None = None
        absent = False
        self._store.make_room(2 * own.nbytes)
        for rank in range(self.num_ranks):
            if not present[rank]:
                absent = True
                continue
            part = torch.empty(own.nbytes, dtype=torch.uint8)
            if rank == self.rank:
                self._copy_own(sharded, part)
            else:
                future = PeerFuture(self.network, f"gradients of {sharded.label}", 1)
                wanted = Wanted(
                    KINDS[Kind.GRAD], key_of(label), self.num_backwards, own.low, own.high
                )
                self.network.pull(rank, wanted, memory_of(part.untyped_storage()), future)
                future.result()
            for view in typed(part, sharded, dtypes):
                view.mul_(1.0 / self.num_ranks)
            if total is None:
                total = part
            else:
                for view, more in zip(
                    typed(total, sharded, dtypes), typed(part, sharded, dtypes), strict=True
                ):
                    view.add_(more)
        assert total is not None
        if absent:  # a rank without it adds zeros
            for view in typed(total, sharded, dtypes):
                view.add_(0.0)
        return total

    def _copy_own(self, sharded: Sharded, part: Tensor) -> None:
        contribution = sharded.contribution
        assert contribution is not None
        part.zero_()
        self._store.lease([contribution])
        try:
            own = cut_out(contribution.pieces(), sharded.own.low, sharded.own.high)
            copy_into(memory_of(part.untyped_storage()), own)
        finally:
            self._store.release([contribution])

    def grad_tier(self, sharded: Sharded) -> GatherTier:
        if sharded.grad is None:
            sharded.grad = self._tier(Kind.GRAD, sharded, f"{sharded.label}.grad")
            sharded.grad.shard = self._new_shard(Kind.GRAD, sharded, sharded.grad)
        return sharded.grad

    def _accumulate(
        self, sharded: Sharded, total: Tensor, dtypes: Sequence[torch.dtype], kept: set[int]
    ) -> None:
        tier = self.grad_tier(sharded)
        shard = tier.shard
        assert shard is not None
        if not kept:
            self._store.drop(shard, 0)
        if shard.is_empty:
            self._store.adopt(shard, 0, total.untyped_storage())
        else:
            self._store.lease([shard])
            try:
                flat = flat_bytes(shard)
                for index, slot in enumerate(sharded.whole.layout.slots):
                    if index not in kept:
                        dropped = sharded.own.intersect(slot.offset_bytes, slot.end_bytes)
                        low = sharded.own.low
                        flat[dropped.low - low : dropped.high - low] = 0
                for view, more in zip(
                    typed(flat, sharded, dtypes), typed(total, sharded, dtypes), strict=True
                ):
                    view.add_(more)
                self._store.mark_changed(shard)
            finally:
                self._store.release([shard])

    def gradient_changed(self, sharded: Sharded) -> None:
        """Our part of a reduced gradient is new: others get it when they have come as far."""
        tier = self.grad_tier(sharded)
        tier.version += 1
        if tier.shard is not None:
            self.offers.offer(Kind.GRAD, tier.label, tier.version, tier.shard, sharded.own.low)

    def homes_with_gradient(self) -> list[tuple[Sharded, Home]]:
        """Parameters whose gradient is reduced, in the same order on every rank."""
        return [
            (sharded, home)
            for key, sharded in self.sharded.items()
            for home in self.slots[key]
            if home.grad is not None
        ]

    def end_of_reduction(self) -> None:
        """Everybody has what it needs of us."""
        self._meet("the end of the reduction")

    def _meet(self, what: str, subject: Subject = Subject.CHANGE) -> None:
        self._num_exchanges += 1
        self.network.collect(subject, self._num_exchanges, b"", what)

    # -- the step ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All ranks are here: from now on values may change."""
        self.num_steps += 1
        self.network.position = (self.num_steps, 3)
        self._forget_copies_under_way()
        self.network.collect(
            Subject.STEP, self.num_steps, struct.pack("<q", self.num_steps), "optimizer.step"
        )

    def _forget_copies_under_way(self) -> None:
        """Nobody may ask for the old values any more once all are in the step."""
        for sharded in self.sharded.values():
            if sharded.param is not None and sharded.whole.fetching is not None:
                self._store.evict(sharded.whole)

    def updated(self, sharded: Sharded) -> None:
        """Our range of a PARAM chunk has its new values."""
        sharded.version += 1
        if sharded.param is not None:
            sharded.param.version = sharded.version
            if sharded.param.shard is not None:
                self.offers.offer(
                    Kind.PARAM,
                    sharded.label,
                    sharded.version,
                    sharded.param.shard,
                    sharded.own.low,
                )
            self._store.forget_copy(sharded.whole)
        elif self.stages.splits(Kind.STATE):
            self.offers.offer(Kind.PARAM, sharded.label, sharded.version, sharded.whole)

    def exchange(self, sharded: Sharded) -> None:
        """Whole parameters, updated in part by each rank: get the others' parts."""
        if self.stages.splits(Kind.PARAM) or not self.stages.splits(Kind.STATE):
            return
        self._store.lease([sharded.whole])
        try:
            self._get_other_parts(sharded)
        finally:
            self._store.release([sharded.whole])

    def _get_other_parts(self, sharded: Sharded) -> None:
        whole = sharded.whole
        futures = []
        for peer in self.network.peers:
            for slot, storage in whole.present():
                place = whole.layout.slots[slot]
                part = sharded.ranges[peer].intersect(place.offset_bytes, place.end_bytes)
                if part.nbytes:
                    low = part.low - place.offset_bytes
                    future = PeerFuture(self.network, sharded.label, 1)
                    wanted = Wanted(
                        KINDS[Kind.PARAM],
                        key_of(sharded.label),
                        sharded.version,
                        part.low,
                        part.high,
                    )
                    target = memory_of(storage)[low : low + part.nbytes]
                    self.network.pull(peer, wanted, target, future)
                    futures.append(future)
        for future in futures:
            future.result()
        self._store.mark_changed(whole)

    def end_step(self) -> None:
        self.network.position = (self.num_steps, 1)

    # -- the end ----------------------------------------------------------------------------------

    def meet_at_close(self, what: str) -> None:
        self.network.position = (self.num_steps, 4)
        self._meet(what, Subject.CLOSE)

    def close(self) -> None:
        self.network.close()
        if self._staging is not None:
            self._staging.release()
            self._staging = None


def typed(flat: Tensor, sharded: Sharded, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Our range as tensors of the parameters' types: one for each run of slots of one type."""
    views = []
    run: tuple[int, int, torch.dtype] | None = None
    for slot, dtype in zip(sharded.whole.layout.slots, dtypes, strict=True):
        part = sharded.own.intersect(slot.offset_bytes, slot.end_bytes)
        if not part.nbytes:
            continue
        if run is not None and run[2] is dtype:
            run = (run[0], part.high, dtype)
        else:
            if run is not None:
                views.append(run)
            run = (part.low, part.high, dtype)
    if run is not None:
        views.append(run)
    low = sharded.own.low
    return [flat[a - low : b - low].view(dtype) for a, b, dtype in views]


def flat_bytes(chunk: Chunk) -> Tensor:
    """The bytes of a leased chunk of one slot."""
    storage = chunk.storages[0]
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def find_num_ranks() -> int:
    """How many processes train together: what torch.distributed or its launcher says."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return dist.get_world_size() if dist.is_initialized() else 1
