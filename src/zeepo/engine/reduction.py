"""Reducing gradients: the ranks' contributions become everybody's mean.

Backward leaves its gradients in contribution chunks. As soon as every parameter of a chunk has got
one, the chunk's [passage](passage.py) begins, while backward goes on with the units before it; the
others' contributions to the range this rank owns are added in the order of the ranks, so neither
stage nor tier nor timing can change a bit. Who has none adds zeros, as torch's DDP does. The sum is
this rank's shard of the gradient; further backwards are added to it.

Ranks may go different ways, so nothing waits while backward runs. At its end the ranks tell each
other which parameters got a gradient, and what is still missing is sent and awaited.

[Note: two turns]
A parameter that gets a gradient twice in one backward (reentrant checkpointing with a weight that
is used in two segments) may get the second when the first is on its way. What comes later goes in a
second turn, after the end of backward.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zeepo import events
from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import copy_into, renew_copy
from zeepo.engine.first_batch import FirstBatch
from zeepo.engine.managed import Home
from zeepo.engine.passage import Passage
from zeepo.engine.ranks import Ranks
from zeepo.engine.sharded import Sharded, Subject
from zeepo.engine.shards import GatherTier, cut_out
from zeepo.engine.summing import UNKNOWN, add_typed, flat_bytes, weights_of
from zeepo.errors import BudgetError, RankError
from zeepo.launch import launching
from zeepo.memory.heap import FreedMemory
from zeepo.memory.pool import Buffer
from zeepo.sharding.watchdog import Phase
from zeepo.units import MiB

MOST_ASKED = 2
"""How many passages have asked for the others' parts at once: so many buffers are needed."""
ENOUGH_FREED_BYTES = 96 * MiB
_BATCH = "<q8s"
"""What is told of a batch: how many samples, and a digest."""
Present = list[set[int]]
"""By rank: the slots of a chunk that have a gradient."""


class Reduction:
    """Contributions and reduced gradients of one session."""

    def __init__(
        self,
        store: ChunkStore,
        ranks: Ranks,
        count_samples: Callable[[], int],
        first_batch: FirstBatch,
    ):
        self._store = store
        self._ranks = ranks
        self._count_samples = count_samples
        self._first_batch = first_batch
        self._told_of_batch = b""
        self._num_samples = 0
        """Since the last reduction, as far as known."""
        self._weights: list[float] | None = None
        self._is_difference_told = False
        self.num_backwards = 0
        self._is_reducing = False
        self._freed = FreedMemory(ENOUGH_FREED_BYTES)
        self._complete: list[Sharded] = []
        """Have all their gradients; their passage begins with the next gradient, so that the
        user's own hooks on this one have run."""
        self._passages: list[Passage] = []
        """Those of this backward that are not over."""

    def contribution_chunk(self, whole: Chunk) -> Chunk:
        """Where backward's gradients for a PARAM chunk are collected."""
        sharded = self._ranks.sharded[whole.key]
        if sharded.contribution is None:
            sharded.contribution, sharded.spare = sharded.spare, None
        if sharded.contribution is None:
            sharded.contribution = self._store.create(
                Kind.GRAD, f"{whole.label}.contribution", whole.layout, self._ranks.tiers[Kind.GRAD]
            )
            sharded.contribution.is_part = True
            sharded.contribution.is_foreseeable = False
        return sharded.contribution

    # -- while backward runs ----------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Under `no_sync` gradients only pile up."""
        self._is_reducing = not self._ranks.is_local
        self._complete = []
        for sharded in self._ranks.sharded.values():
            sharded.fresh.clear()
            sharded.sent = None
        count = self._count_samples()
        is_unknown = UNKNOWN in (count, self._num_samples)
        self._num_samples = UNKNOWN if is_unknown else self._num_samples + count
        if self._is_reducing:
            self.num_backwards += 1
            self._ranks.network.position = (self._ranks.num_steps, Phase.BACKWARD)
            digest = self._first_batch.take()
            self._told_of_batch = struct.pack(_BATCH, self._num_samples, digest)
            self._ranks.network.tell(Subject.SAMPLES, self.num_backwards, self._told_of_batch)
            self._weights = None

    def contributed(self, home: Home) -> None:
        """A parameter has got a gradient."""
        sharded = self._ranks.sharded[home.chunk.key]
        sharded.fresh.add(home.index)
        if not self._is_reducing or sharded.sent is not None or sharded in self._complete:
            return
        homes = self._ranks.slots[sharded.whole.key]
        if all(h.index in sharded.fresh for h in homes if _is_trained(h)):
            self._complete.append(sharded)

    def proceed(self) -> None:
        """Do what can be done without waiting."""
        for sharded in self._complete:
            self._send(sharded, turn=0)
        self._complete = []
        for passage in self._passages:
            if passage.has_come and not passage.is_summed:
                self._keep_sum(passage, set())
        self._let_go_of_what_is_over()
        self._ask(self._passages, self._ranks.network.peers)

    def _send(self, sharded: Sharded, turn: int) -> None:
        """Begin the passage of what we have of a chunk, which may be nothing."""
        tensors: list[Tensor] = []
        for home in self._ranks.slots[sharded.whole.key]:
            if home.contribution is not None:
                tensors.append(home.contribution)
                home.contribution = None
        contribution, sharded.contribution = sharded.contribution, None
        if contribution is not None and contribution.is_empty:
            sharded.spare, contribution = contribution, None
        passage = Passage(
            self._store, self._ranks, sharded, contribution, tensors, self.num_backwards, turn
        )
        sharded.sent = _slots(contribution)
        self._passages.append(passage)
        self._freed.look()
        passage.offer()
        if passage.is_summed:
            self.gradient_changed(sharded)

    def _ask(self, passages: Sequence[Passage], peers: Sequence[int]) -> None:
        """Ask for the parts of the first few, as far as there is room."""
        waiting = [passage for passage in passages if not passage.is_summed]
        for passage in waiting[:MOST_ASKED]:
            if not passage.is_asked:
                try:
                    passage.ask(peers)
                except BudgetError:  # tried again later, when less is in use
                    return

    def _let_go_of_what_is_over(self) -> None:
        for passage in self._passages:
            if passage.is_over:
                passage.let_go()
        self._passages = [passage for passage in self._passages if not passage.is_over]

    # -- at its end -------------------------------------------------------------------------------

    def end_backward(self) -> dict[int, set[int]]:
        """Reduce what is left; PARAM chunk -> the slots that got a gradient on some rank."""
        self.proceed()
        present = self._agree()
        for sharded in reversed(self._ranks.sharded.values()):
            if sharded.sent is None and any(present[sharded.whole.key, 0]):
                self._send(sharded, turn=0)
        self._finish(present, turn=0)
        for sharded in reversed(self._ranks.sharded.values()):  # [Note: two turns]
            if any(present[sharded.whole.key, 1]):
                self._send(sharded, turn=1)
        self._finish(present, turn=1)
        self.weigh()  # whatever was told is heard
        self._num_samples = 0
        self._is_reducing = False
        return {
            key: set().union(*present[key, 0], *present[key, 1])
            for key in self._ranks.sharded
            if any(present[key, 0])
        }

    def _agree(self) -> dict[tuple[int, int], Present]:
        """(PARAM chunk, turn) -> on each rank, the slots that got a gradient in this backward."""
        chunks = self._ranks.sharded
        self._ranks.network.position = (self._ranks.num_steps, Phase.END_OF_BACKWARD)
        mine = bytearray()
        for sharded in chunks.values():
            left = _slots(sharded.contribution)
            sent = left if sharded.sent is None else sharded.sent
            late: set[int] = set() if sharded.sent is None else left
            slots = range(len(sharded.whole.layout.slots))
            mine += bytes((i in sent) + 2 * (i in late) for i in slots)
        told = self._ranks.network.collect(
            Subject.BACKWARD, self.num_backwards, bytes(mine), "the end of backward"
        )
        lengths = {len(fact) for fact in told}
        if len(lengths) > 1:
            raise RankError(f"the ranks' models differ: {sorted(lengths)} parameters.")
        found: dict[tuple[int, int], Present] = {}
        at = 0
        for key, sharded in chunks.items():
            end = at + len(sharded.whole.layout.slots)
            for turn in (0, 1):
                found[key, turn] = [
                    {i for i, flags in enumerate(fact[at:end]) if flags & (1 << turn)}
                    for fact in told
                ]
            at = end
        return found

    def _finish(self, present: Mapping[tuple[int, int], Present], turn: int) -> None:
        """Sum what is left, and wait until the others have what they need of us."""
        while waiting := [passage for passage in self._passages if not passage.is_summed]:
            for passage in waiting[:MOST_ASKED]:
                if not passage.is_asked:
                    having = present[passage.sharded.whole.key, turn]
                    self._ask([passage], [p for p in self._ranks.network.peers if having[p]])
            first = waiting[0]
            key = first.sharded.whole.key
            if not first.is_asked:  # there is no room: this says so
                first.ask([p for p in self._ranks.network.peers if present[key, turn][p]])
            self._keep_sum(first, set().union(*present[key, 0]) if turn else set())
        for passage in self._passages:
            passage.wait_until_over()
        self._let_go_of_what_is_over()

    # -- the reduced gradients --------------------------------------------------------------------

    def grad_tier(self, sharded: Sharded) -> GatherTier:
        if sharded.grad is None:
            sharded.grad = self._ranks.tier(Kind.GRAD, sharded, f"{sharded.label}.grad")
            sharded.grad.shard = self._ranks.new_shard(Kind.GRAD, sharded, sharded.grad)
        return sharded.grad

    def _keep_sum(self, passage: Passage, kept_too: set[int]) -> None:
        """The sum becomes our shard, or is added to it; `kept_too`: slots of the turn before."""
        sharded = passage.sharded
        homes = self._ranks.slots[sharded.whole.key]
        dtypes = [home.plain.dtype for home in homes]
        total = passage.sum(self.weigh(), dtypes)
        kept = kept_too | {home.index for home in homes if home.grad is not None}
        shard = self.grad_tier(sharded).shard
        assert shard is not None
        if not kept:
            self._store.drop(shard, 0)
        if shard.is_empty:
            self._store.adopt_buffer(shard, total)
        else:
            self._add_to_shard(sharded, shard, total, dtypes, kept)
            total.release()
        self.gradient_changed(sharded)

    def weigh(self) -> list[float]:
        """By how much each rank's gradients of this backward count."""
        if self._weights is None:
            told = self._ranks.network.await_all(
                Subject.SAMPLES, self.num_backwards, "the size of its batch"
            )
            told[self._ranks.rank] = self._told_of_batch
            facts = [struct.unpack(_BATCH, told[r]) for r in range(self._ranks.num_ranks)]
            counts = [count for count, _ in facts]
            self._weights = weights_of(counts)
            self._first_batch.compare([digest for _, digest in facts], self._ranks.rank)
            self._tell_of_difference(counts)
        return self._weights

    def _tell_of_difference(self, counts: Sequence[int]) -> None:
        if (
            len(set(self._weights or [])) > 1
            and not self._is_difference_told
            and not self._ranks.rank
            and launching.slices is None
        ):
            self._is_difference_told = True
            events.warn(
                f"the ranks' batches have {', '.join(map(str, counts))} samples: their gradients "
                "are weighted by that (weigh_samples=False: all ranks alike, as torch's DDP)."
            )

    def _add_to_shard(
        self,
        sharded: Sharded,
        shard: Chunk,
        total: Buffer,
        dtypes: Sequence[torch.dtype],
        kept: set[int],
    ) -> None:
        own = sharded.own
        self._store.lease([shard])
        try:
            flat = flat_bytes(shard)
            for index, slot in enumerate(sharded.whole.layout.slots):
                if index not in kept:
                    dropped = own.intersect(slot.offset_bytes, slot.end_bytes)
                    flat[dropped.low - own.low : dropped.high - own.low] = 0
            more = torch.frombuffer(total.memory, dtype=torch.uint8, count=own.nbytes)
            add_typed(flat, more, sharded, dtypes)
            self._store.mark_changed(shard)
        finally:
            self._store.release([shard])

    def replace(self, home: Home, value: Tensor) -> None:
        """The user's own gradient, in the parameter's order in memory, becomes the reduced one."""
        sharded = self._ranks.sharded[home.chunk.key]
        memory = memory_of(value.untyped_storage())
        self._ranks.agree_on_change(memory, f"{home.name}.grad")
        shard, own = self.grad_tier(sharded).shard, sharded.own
        slot = sharded.whole.layout.slots[home.index]
        if shard is not None:
            if shard.is_empty:
                self._fill_with_zeros(shard)
            self._store.lease([shard])
            try:
                ((_, here),) = shard.pieces()
                copy_into(here, cut_out([(slot.offset_bytes, memory)], own.low, own.high))
                self._store.mark_changed(shard)
            finally:
                self._store.release([shard])
        self.gradient_changed(sharded)

    def written_by_update(self, whole: Chunk) -> None:
        """An optimizer has unscaled gradients in its step: whole ones (stage 0), or our parts."""
        sharded = self._ranks.by_grad_chunk[whole.key]
        if self._ranks.stages.splits(Kind.STATE):
            self.gradient_changed(sharded)
            renew_copy(self._store, whole)
            return
        self._store.lease([whole])
        try:
            self.grad_tier(sharded).write_to_shard(whole.pieces())
        finally:
            self._store.release([whole])
        self.gradient_changed(sharded)
        whole.version += 1
        whole.lower_version = whole.version

    def _fill_with_zeros(self, shard: Chunk) -> None:
        buffer = self._store.new_buffer(shard.layout.nbytes, shard.kind.value)
        torch.frombuffer(buffer.memory, dtype=torch.uint8).zero_()
        self._store.adopt_buffer(shard, buffer)

    def refuse_unreduced(self) -> None:
        """A step needs gradients that all ranks have agreed on."""
        for key in self._ranks.sharded:
            for home in self._ranks.slots[key]:
                if home.contribution is not None:
                    raise RankError(
                        f"optimizer.step: the gradient of {home.name} was made inside no_sync() "
                        "and is this rank's own. Call the last backward() before optimizer.step() "
                        "outside no_sync()."
                    )

    def gradient_changed(self, sharded: Sharded) -> None:
        """Our part of a reduced gradient is new: others get it when they have come as far."""
        self._ranks.offers.offer_next(self.grad_tier(sharded))

    def homes_with_gradient(self) -> list[tuple[Sharded, Home]]:
        """Parameters whose gradient is reduced, in the same order on every rank."""
        return [
            (sharded, home)
            for key, sharded in self._ranks.sharded.items()
            for home in self._ranks.slots[key]
            if home.grad is not None
        ]


def _is_trained(home: Home) -> bool:
    return home.parameter is not None and home.parameter.requires_grad


def _slots(contribution: Chunk | None) -> set[int]:
    return set() if contribution is None else {index for index, _ in contribution.present()}
