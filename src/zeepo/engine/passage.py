"""The gradients of one PARAM chunk on their way from every rank to the owners of its ranges.

A passage begins when this rank has nothing more to add: what it has is offered to the others, and
the others are asked for their contributions to the range it owns. They may be far behind, or ahead,
or have none: an answer comes when there is one. Then the parts are added, and what the others have
taken from us is let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import copy_into
from zeepo.engine.forgetting import forget
from zeepo.engine.ranks import Ranks
from zeepo.engine.sharded import Sharded
from zeepo.engine.shards import Offered, cut_out
from zeepo.engine.summing import add_typed, add_zero, scale_typed
from zeepo.errors import BudgetError
from zeepo.memory.pool import Buffer
from zeepo.sharding.requests import PeerFuture

STAGING_TAG = "staging"


class Passage:
    """One chunk's contributions of one backward."""

    def __init__(
        self,
        store: ChunkStore,
        ranks: Ranks,
        sharded: Sharded,
        contribution: Chunk | None,
        tensors: list[Tensor],
        number: int,
        turn: int,
    ):
        self.sharded = sharded
        self._store = store
        self._ranks = ranks
        self._contribution = contribution
        self._tensors = tensors
        self._offered = Offered(Kind.GRAD, f"{sharded.label}.contribution{turn}", number)
        self._num_to_take = 0
        """How many ranks have not taken their range yet."""
        self._future: PeerFuture | None = None
        self._parts: dict[int, Buffer] = {}
        self.is_summed = sharded.own.nbytes == 0

    @property
    def has_gradients(self) -> bool:
        return self._contribution is not None

    def offer(self) -> None:
        """From now on the others may take their ranges."""
        if self._contribution is not None:
            ranges = self.sharded.ranges
            self._num_to_take = sum(ranges[peer].nbytes > 0 for peer in self._ranks.network.peers)
        self._ranks.offers.offer(
            Kind.GRAD,
            self._offered.label,
            self._offered.version,
            self._contribution,
            on_taken=self._taken,
        )

    def _taken(self) -> None:
        """In a link's thread, under the store's lock."""
        self._num_to_take -= 1

    @property
    def is_asked(self) -> bool:
        return self._future is not None

    def ask(self, peers: Iterable[int]) -> None:
        """Ask these ranks for their contributions to our range; BudgetError if there is no room."""
        own = self.sharded.own
        asked = list(peers)
        try:
            for rank in [self._ranks.rank, *asked] if self.has_gradients else asked:
                self._parts[rank] = self._store.new_buffer(own.nbytes, STAGING_TAG)
        except BudgetError:
            for buffer in self._parts.values():
                buffer.release()
            self._parts = {}
            raise
        what = f"gradients of {self.sharded.label}"
        self._future = PeerFuture(self._ranks.network, what, len(asked))
        for peer in asked:
            target = self._parts[peer].memory[: own.nbytes]
            self._offered.ask(self._ranks.network, peer, own, target, self._future)

    @property
    def has_come(self) -> bool:
        """Whether summing need not wait."""
        return self._future is not None and self._future.done()

    def sum(self, weights: Sequence[float], dtypes: Sequence[torch.dtype]) -> Buffer:
        """The weighted sum of all contributions to our range, added in the order of the ranks."""
        assert self._future is not None
        self._future.result()
        if self.has_gradients:
            self._copy_own()
        total: Tensor | None = None
        nbytes = self.sharded.own.nbytes
        parts = sorted(self._parts.items())
        for rank, buffer in parts:
            buffer.touched()
            part = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=nbytes)
            scale_typed(part, weights[rank], self.sharded, dtypes)
            if total is None:
                total = part
            else:
                add_typed(total, part, self.sharded, dtypes)
        assert total is not None
        if len(parts) < self._ranks.num_ranks:
            add_zero(total, self.sharded, dtypes)
        result = parts[0][1]
        for _, buffer in parts[1:]:
            buffer.release()
        self._parts = {}
        self.is_summed = True
        return result

    def _copy_own(self) -> None:
        contribution, own = self._contribution, self.sharded.own
        assert contribution is not None
        part = self._parts[self._ranks.rank].memory[: own.nbytes]
        self._store.lease([contribution])
        try:
            pieces = cut_out(contribution.pieces(), own.low, own.high)
            if sum(memory.nbytes for _, memory in pieces) < own.nbytes:
                torch.frombuffer(part, dtype=torch.uint8).zero_()
            copy_into(part, pieces)
        finally:
            self._store.release([contribution])

    @property
    def is_over(self) -> bool:
        """Whether nobody needs our contribution any more."""
        return self.is_summed and self._num_to_take == 0

    def wait_until_over(self) -> None:
        """Until the others have taken what they need of us."""
        what = f"to take gradients of {self.sharded.label}"
        self._ranks.network.wait_until(lambda: self._num_to_take == 0, what)

    def let_go(self) -> None:
        """Free the memory of our contribution."""
        while self._tensors:
            tensor = self._tensors.pop()
            forget(self._store, tensor)
        if self._contribution is not None:
            self.sharded.spare = self._contribution
