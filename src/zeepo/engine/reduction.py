"""Reducing gradients: the ranks' contributions become everybody's mean.

Backward leaves its gradients in a contribution chunk. At the end of backward every rank tells which
parameters it has some for; then each takes the others' contributions to the range it owns and adds
them in the order of the ranks. Who has none adds zeros, as torch's DDP does. The sum is this rank's
shard of the gradient; further backwards are added to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import copy_into
from zeepo.engine.managed import Home
from zeepo.engine.ranks import Ranks
from zeepo.engine.sharded import Sharded, Subject
from zeepo.engine.shards import GatherTier, Offered, cut_out
from zeepo.errors import RankError


class Reduction:
    """Contributions and reduced gradients of one session."""

    def __init__(self, store: ChunkStore, ranks: Ranks):
        self._store = store
        self._ranks = ranks
        self.num_backwards = 0

    def contribution_chunk(self, whole: Chunk) -> Chunk:
        """Where backward's gradients for a PARAM chunk are collected."""
        sharded = self._ranks.sharded[whole.key]
        if sharded.contribution is None:
            sharded.contribution = self._store.create(
                Kind.GRAD, f"{whole.label}.contribution", whole.layout, self._ranks.tiers[Kind.GRAD]
            )
            sharded.contribution.is_part = True
        return sharded.contribution

    def agree_on_gradients(self) -> dict[int, list[set[int]]]:
        """PARAM chunk -> on each rank, the slots that got a gradient in this backward."""
        mine = b"".join(
            bytes(storage is not None for storage in sharded.contribution.storages)
            if sharded.contribution is not None
            else bytes(len(sharded.whole.layout.slots))
            for sharded in self._ranks.sharded.values()
        )
        self.num_backwards += 1
        self._ranks.network.position = (self._ranks.num_steps, 2)
        told = self._ranks.network.collect(
            Subject.BACKWARD, self.num_backwards, mine, "the end of backward"
        )
        lengths = {len(fact) for fact in told}
        if len(lengths) > 1:
            raise RankError(f"the ranks' models differ: {sorted(lengths)} parameters.")
        found: dict[int, list[set[int]]] = {}
        at = 0
        for key, sharded in self._ranks.sharded.items():
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
        sharded = self._ranks.sharded[key]
        number = self.num_backwards
        label = f"{sharded.label}.contribution"
        contribution = sharded.contribution
        if contribution is not None and present[self._ranks.rank]:
            self._ranks.offers.offer(Kind.GRAD, label, number, contribution)
        total = self._sum(sharded, present, dtypes, label) if sharded.own.nbytes else None
        if total is not None:
            self._accumulate(sharded, total, dtypes, kept)
        self.gradient_changed(sharded)

    def _sum(
        self,
        sharded: Sharded,
        present: Sequence[set[int]],
        dtypes: Sequence[torch.dtype],
        label: str,
    ) -> Tensor:
        """The mean of the contributions to our range, as flat bytes."""
        own = sharded.own
        offered = Offered(Kind.GRAD, label, self.num_backwards)
        total: Tensor | None = None
        absent = False
        self._store.make_room(2 * own.nbytes)
        for rank in range(self._ranks.num_ranks):
            if not present[rank]:
                absent = True
                continue
            part = torch.empty(own.nbytes, dtype=torch.uint8)
            if rank == self._ranks.rank:
                self._copy_own(sharded, part)
            else:
                offered.get(
                    self._ranks.network,
                    rank,
                    own,
                    memory_of(part.untyped_storage()),
                    f"gradients of {sharded.label}",
                )
            for view in typed(part, sharded, dtypes):
                view.mul_(1.0 / self._ranks.num_ranks)
            if total is None:
                total = part
            else:
                add_typed(total, part, sharded, dtypes)
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
            sharded.grad = self._ranks.tier(Kind.GRAD, sharded, f"{sharded.label}.grad")
            sharded.grad.shard = self._ranks.new_shard(Kind.GRAD, sharded, sharded.grad)
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
                add_typed(flat, total, sharded, dtypes)
                self._store.mark_changed(shard)
            finally:
                self._store.release([shard])

    def gradient_changed(self, sharded: Sharded) -> None:
        """Our part of a reduced gradient is new: others get it when they have come as far."""
        self._ranks.offers.offer_next(self.grad_tier(sharded))

    def end(self) -> None:
        """Everybody has what it needs of us."""
        self._ranks.meet("the end of the reduction")

    def homes_with_gradient(self) -> list[tuple[Sharded, Home]]:
        """Parameters whose gradient is reduced, in the same order on every rank."""
        return [
            (sharded, home)
            for key, sharded in self._ranks.sharded.items()
            for home in self._ranks.slots[key]
            if home.grad is not None
        ]


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


def add_typed(total: Tensor, more: Tensor, sharded: Sharded, dtypes: Sequence[torch.dtype]) -> None:
    """Add flat bytes of our range to others, as what they are."""
    pairs = zip(typed(total, sharded, dtypes), typed(more, sharded, dtypes), strict=True)
    for view, addend in pairs:
        view.add_(addend)


def flat_bytes(chunk: Chunk) -> Tensor:
    """The bytes of a leased chunk of one slot."""
    storage = chunk.storages[0]
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
