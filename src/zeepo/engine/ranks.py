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

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import xxhash
from torch import Tensor
from torch.optim import Optimizer

from zeepo.chunks.layout import pack
from zeepo.chunks.storages import memory_of, new_storage
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import digest_of, forget_copy, renew_copy, rest_on
from zeepo.engine.managed import Home
from zeepo.engine.sharded import Sharded, Stages, Subject
from zeepo.engine.shards import KIND_NAMES, GatherTier, Offered, Offers, key_of
from zeepo.engine.step_facts import StepFacts, check_same
from zeepo.engine.team import Team
from zeepo.engine.tuning import tuning
from zeepo.errors import RankError, UnsupportedError
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Tier
from zeepo.optim.catalogue import Grain, grain_of
from zeepo.sharding.network import Network
from zeepo.sharding.ranges import Range, split
from zeepo.sharding.requests import PeerFuture
from zeepo.sharding.watchdog import Phase

COUNTED = (Subject.BACKWARD, Subject.STEP)
"""Facts whose number the user can count."""


class Ranks:
    """All ranks, seen from this one."""

    def __init__(self, store: ChunkStore, stage: int, tiers: dict[Kind, Tier | None], team: Team):
        self.stages = Stages(stage)
        self._store = store
        self.tiers = tiers
        self._weights = team.weights
        patience = tuning().rank_patience_seconds
        self.network = Network(team.group, store.lock, patience, KIND_NAMES, COUNTED)
        self.offers = Offers(store, self.network)
        self.rank, self.num_ranks = self.network.rank, self.network.num_ranks
        self.sharded: dict[int, Sharded] = {}
        """By the key of the PARAM chunk."""
        self.by_grad_chunk: dict[int, Sharded] = {}
        """By the key of the chunk of whole gradients."""
        self.slots: Mapping[int, Sequence[Home]] = {}
        """The manager's: by the key of the PARAM chunk, the parameters in it."""
        self.num_steps = 0
        self._num_exchanges = 0
        self.is_local = 0
        """How many `no_sync` blocks we are in."""
        self.step_facts = StepFacts()
        self._changed: set[str] = set()
        """PARAM chunks, whole on every rank, that the user changed since the last step."""
        self._stagings: list[Buffer] = []
        """The last is in use; a rank may still read from one before it."""
        self._to_refresh: list[Sharded] = []
        self._num_to_take = 0
        """Of updated parameters, whole on every rank: parts that others have yet to take."""
        self.network.meet(Subject.START)

    # -- at init ----------------------------------------------------------------------------------

    def add(self, whole: Chunk) -> Sharded:
        """Agree on the values of a PARAM chunk, and split it if parameters are split."""
        self.take_staging(whole.layout.nbytes)  # one that comes late may be the largest
        ranges = split(whole.layout.nbytes, self._weights)
        sharded = Sharded(whole, ranges, self.rank)
        self.sharded[whole.key] = sharded
        for suffix in ("", ".contribution0", ".contribution1", ".grad"):
            self.network.asking.parameters[key_of(whole.label + suffix)] = sharded.parameters
        self._agree_on_values(whole)
        if self.stages.splits(Kind.PARAM):
            sharded.param = tier = self.tier(Kind.PARAM, sharded, whole.label)
            tier.shard = self.new_shard(Kind.PARAM, sharded, tier)
            if tier.shard is not None:
                self._store.lease([whole])
                try:
                    storage = new_storage(tier.shard.layout.nbytes)
                    self._store.adopt(tier.shard, 0, storage, copy=True)
                    tier.write_to_shard(whole.pieces())
                finally:
                    self._store.release([whole])
                self.offers.offer(Kind.PARAM, whole.label, 0, tier.shard, sharded.own.low)
            rest_on(self._store, whole, tier)
        return sharded

    def take_staging(self, nbytes: int) -> None:
        """Room in which what others ask for is read from disk: the largest chunk's size."""
        if all(tier is None for tier in self.tiers.values()):
            return
        if not self._stagings or self._stagings[-1].capacity_bytes < nbytes:
            self._stagings.append(self._store.new_buffer(nbytes, "staging"))
            self.offers.use_staging(self._stagings[-1].memory)

    def tier(self, kind: Kind, sharded: Sharded, label: str) -> GatherTier:
        """Where a whole that is split comes from."""
        return GatherTier(self._store, self.network, kind, label, sharded.ranges)

    def new_shard(self, kind: Kind, sharded: Sharded, tier: GatherTier) -> Chunk | None:
        """An empty chunk for what this rank has of a whole; None when that is nothing."""
        if not sharded.own.nbytes:
            return None
        label = f"{tier.label}[rank {self.rank}]"
        shard = self._store.create(
            kind, label, pack([(label, sharded.own.nbytes)]), self.tiers[kind]
        )
        shard.is_part = True
        return shard

    def _agree_on_values(self, whole: Chunk) -> None:
        """Rank 0's initial values are everybody's."""
        self._store.lease([whole])
        try:
            label = whole.label
            initial = Offered(Kind.PARAM, f"{label} at init", 0)
            self.offers.offer(Kind.PARAM, initial.label, 0, whole)
            digests = self._exchange(Subject.VALUES, digest_of(whole), label)
            if self.rank and digests[self.rank] != digests[0]:
                for slot, storage in whole.present():
                    place = whole.layout.slots[slot]
                    part = Range(place.offset_bytes, place.end_bytes)
                    initial.get(self.network, 0, part, memory_of(storage), f"{label} of rank 0")
                self._store.mark_changed(whole)
            self.meet(label, Subject.VALUES)
            self.offers.withdraw(Kind.PARAM, initial.label)
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

    def meet(self, what: str, subject: Subject = Subject.CHANGE) -> None:
        """Wait until every rank has come here."""
        self._exchange(subject, b"", what)

    def _exchange(self, subject: Subject, fact: bytes, what: str) -> list[bytes]:
        """Everybody's fact, by rank."""
        self._num_exchanges += 1
        return self.network.collect(subject, self._num_exchanges, fact, what)

    def whole_changed(self, whole: Chunk) -> None:
        """The user changed a whole that is split (leased): all ranks must have done the same.

        Only then may shards change: until all have come here, somebody may need the old values.
        """
        tier = whole.home
        assert isinstance(tier, GatherTier)
        self._agree_on_digest(digest_of(whole), whole.label)
        tier.write_to_shard(whole.pieces())
        self.offers.offer_next(tier)
        whole.version += 1
        whole.lower_version = whole.version

    def agree_on_model(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """RankError unless every rank has built the same model."""
        mine = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]
        told = self._exchange(Subject.VALUES, json.dumps(mine).encode(), "the model")
        models = [json.loads(fact) for fact in told]
        for rank, model in enumerate(models):
            if model != models[0]:
                pairs = zip_longest(model, models[0], fillvalue="nothing")
                here, first = next((a, b) for a, b in pairs if a != b)
                raise RankError(
                    f"init: the models differ: rank {rank} has {here} where rank 0 has {first}. "
                    "Build the same model on every rank."
                )

    def agree_on_state(self, digest: bytes, optimizer: str) -> None:
        """RankError unless an optimizer came to init with the same state on all ranks."""
        told = self._exchange(Subject.VALUES, digest, f"the state of {optimizer}")
        differing = [rank for rank in range(self.num_ranks) if told[rank] != told[0]]
        if differing:
            raise RankError(
                f"init: the state of {optimizer} on rank {differing[0]} is not that of rank 0. "
                "Load the same checkpoint into it on every rank, or start without state."
            )

    def agree_on_change(self, values: memoryview, what: str) -> None:
        """RankError unless all ranks give the same bytes."""
        self._agree_on_digest(xxhash.xxh3_128_digest(values), what)

    def _agree_on_digest(self, digest: bytes, what: str) -> None:
        told = self._exchange(Subject.CHANGE, digest, f"a change of {what}")
        differing = [rank for rank in range(self.num_ranks) if told[rank] != told[0]]
        if differing:
            raise RankError(
                f"{what} was changed to other values on rank {differing[0]} than on rank 0. "
                "A change outside optimizer.step() has to be the same on every rank: use the same "
                "random seed, or send one rank's values to all (torch.distributed.broadcast)."
            )

    # -- the step ---------------------------------------------------------------------------------

    def begin_step(self, facts: bytes) -> None:
        """All ranks are here, and about to do the same: from now on values may change."""
        self.num_steps += 1
        self.network.position = (self.num_steps, Phase.STEP)
        self._settle_copies()
        changed = json.dumps(sorted(self._changed)).encode()
        told = self.network.collect(Subject.STEP, self.num_steps, facts + changed, "optimizer.step")
        check_same([fact[: len(facts)] for fact in told])
        self._agree_on_wholes({n for fact in told for n in json.loads(fact[len(facts) :])})

    def changed_by_hand(self, chunk: Chunk) -> None:
        """The user changed a chunk that is whole on every rank: the next step looks at it."""
        if chunk.key in self.sharded:
            self._changed.add(chunk.label)

    def forget_changes(self) -> None:
        self._changed.clear()

    def _agree_on_wholes(self, labels: set[str]) -> None:
        """What somebody changed is the same everywhere, also if others had it already."""
        for whole in [s.whole for s in self.sharded.values() if s.label in labels]:
            self._store.lease([whole])
            try:
                self._agree_on_digest(digest_of(whole), whole.label)
            finally:
                self._store.release([whole])
        self.forget_changes()

    @property
    def is_closing(self) -> bool:
        return self.network.position[1] == Phase.CLOSING

    def _settle_copies(self) -> None:
        """What was changed in a whole goes to its shard, and no old value is on its way any more:
        once all are in the step nobody may ask for it, so nothing is read ahead either before this
        rank has updated it too."""
        for sharded in self.sharded.values():
            if sharded.param is None:
                continue
            whole = sharded.whole
            whole.may_be_prefetched = False
            is_unsettled = whole.fetching is not None or (whole.is_resident and whole.is_dirty)
            if is_unsettled and not whole.leases:
                self._store.evict(whole)

    def updated(self, sharded: Sharded) -> None:
        """Our range of a PARAM chunk has its new values."""
        sharded.version += 1
        if sharded.param is not None:
            self.offers.offer_next(sharded.param)
            sharded.whole.may_be_prefetched = True
            if sharded.whole.leases:
                self._to_refresh.append(sharded)
            else:
                forget_copy(self._store, sharded.whole)
        elif self.stages.splits(Kind.STATE):
            whole, version = sharded.whole, sharded.version
            with self._store.lock:
                self._num_to_take += len(self.network.peers) * len(_parts(sharded, self.rank))
            self.offers.offer(Kind.PARAM, whole.label, version, whole, on_taken=self._taken)

    def _taken(self) -> None:
        """In a link's thread, under the store's lock."""
        self._num_to_take -= 1

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
        offered = Offered(Kind.PARAM, sharded.label, sharded.version)
        futures = []
        for peer in self.network.peers:
            for slot, part in _parts(sharded, peer):
                future = PeerFuture(self.network, sharded.label, 1)
                low = part.low - whole.layout.slots[slot].offset_bytes
                storage = whole.storages[slot]
                assert storage is not None
                target = memory_of(storage)[low : low + part.nbytes]
                offered.ask(self.network, peer, part, target, future)
                futures.append(future)
        for future in futures:
            future.result()
        self._store.mark_changed(whole)

    def end_step(self) -> None:
        """Wholes that somebody holds by their address get the new values where they are.

        What others have yet to take is awaited: the user may change it as soon as this is over.
        """
        if self._num_to_take:
            self.network.wait_until(lambda: self._num_to_take == 0, "to take updated parameters")
        for sharded in self._to_refresh:
            renew_copy(self._store, sharded.whole)
        self._to_refresh.clear()
        for sharded in self.sharded.values():  # those without a gradient were not updated
            if sharded.param is not None:
                sharded.whole.may_be_prefetched = True
        if not self.stages.splits(Kind.STATE):  # others may still gather gradients for theirs
            self.meet("the end of optimizer.step")
        self.network.position = (self.num_steps, Phase.FORWARD)

    # -- the end ----------------------------------------------------------------------------------

    def meet_at_close(self, what: str) -> None:
        self.network.position = (self.num_steps, Phase.CLOSING)
        self.meet(what, Subject.CLOSE)

    def close(self) -> None:
        self.network.close()
        while self._stagings:
            self._stagings.pop().release()


def _parts(sharded: Sharded, rank: int) -> list[tuple[int, Range]]:
    """What a rank owns of a whole, parameter by parameter: the slot, and the range in the whole."""
    found = []
    for slot, _ in sharded.whole.present():
        place = sharded.whole.layout.slots[slot]
        part = sharded.ranges[rank].intersect(place.offset_bytes, place.end_bytes)
        if part.nbytes:
            found.append((slot, part))
    return found


def choose_stage(wanted: int | str, optimizers: Sequence[Optimizer]) -> int:
    """The stage to use; the highest by default, where the optimizers can be split."""
    unsplittable = [o for o in optimizers if grain_of(o) is not Grain.ELEMENT]
    if wanted == "auto":
        return 0 if unsplittable else 3
    if wanted != 0 and unsplittable:
        raise UnsupportedError(
            f"stage={wanted}: {type(unsplittable[0]).__name__} needs whole parameters: its state "
            "cannot be split over the ranks by this version. Use stage=0, or an optimizer of "
            "torch.optim that treats every element alike (AdamW, SGD, ...)."
        )
    return int(wanted)
