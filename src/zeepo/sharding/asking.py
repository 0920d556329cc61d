"""What this rank has asked of others and not got yet. Answers arrive in the links' threads."""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections.abc import Callable, Sequence

from zeepo.errors import RankError
from zeepo.sharding.link import Link
from zeepo.sharding.messages import Message, Topic
from zeepo.sharding.neighbour import Place, address_of, read_memory
from zeepo.sharding.requests import PeerFuture, Pull, Wanted
from zeepo.sharding.watchdog import Watchdog

MOST_NAMES = 4


class Asking:
    """Requests to other ranks, until they are answered."""

    def __init__(
        self,
        links: dict[int, Link],
        watchdog: Watchdog,
        state: threading.Condition,
        on_received: Callable[[int, int], None],
    ):
        """`on_received` is told kind and bytes of every answer."""
        self.near: dict[int, int] = {}
        """Ranks whose memory we can read -> their process."""
        self.parameters: dict[int, Sequence[tuple[str, int, int]]] = {}
        """By key: the parameters that lie in what can be asked for, from where to where."""
        self._links = links
        self._watchdog = watchdog
        self._state = state
        self._on_received = on_received
        self._identities = itertools.count(1)
        self._pulls: dict[int, Pull] = {}

    def pull(self, peer: int, wanted: Wanted, target: memoryview, future: PeerFuture) -> None:
        """Ask a rank for bytes, as one part of `future`."""
        identity = next(self._identities)
        pull = Pull(peer, wanted, target, future)
        with self._state:
            is_gone = peer in self._watchdog.ended
            if not is_gone:
                future.waits_for.add(peer)
                self._pulls[identity] = pull
        if is_gone:
            future.part_done(self._watchdog.gone(peer, self._words(pull)))
            return
        can_read = int(peer in self.near)
        what = (wanted.kind, wanted.key, wanted.version, wanted.low, wanted.high, can_read)
        self._links[peer].post(Message(Topic.PULL, identity, what))

    def words_of(self, future: PeerFuture, peer: int) -> str:
        """What a rank still has to give for a future, with the names of the parameters."""
        with self._state:
            pulls = [p for p in self._pulls.values() if p.future is future and p.peer == peer]
        return self._words(pulls[0]) if pulls else future.what

    def _words(self, pull: Pull) -> str:
        wanted = pull.wanted
        names = [
            name
            for name, low, high in self.parameters.get(wanted.key, ())
            if low < wanted.high and wanted.low < high
        ]
        if not names:
            return pull.future.what
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"{pull.future.what}: {', '.join(names[:MOST_NAMES])}{more}"

    # -- in the links' threads --------------------------------------------------------------------

    def target_of(self, message: Message) -> memoryview:
        """Where the bytes belong that answer a request."""
        with self._state:
            return self._pulls[message.identity].target

    def answered(self, message: Message) -> None:
        """The bytes have come."""
        with self._state:
            pull = self._pulls.pop(message.identity)
        self._on_received(message.arguments[0], pull.target.nbytes)
        pull.future.waits_for.discard(pull.peer)
        pull.future.part_done()

    def refused(self, peer: int, message: Message, reason: str) -> None:
        """They cannot be had."""
        with self._state:
            pull = self._pulls.pop(message.identity)
        words = self._words(pull)
        pull.future.part_done(RankError(f"rank {peer} cannot give {words}: {reason}"))

    def copy_loan(self, peer: int, message: Message, table: bytes) -> None:
        """Copy what lies in the other's memory; OSError when that process is gone."""
        numbers = array("q", table)
        places = [Place(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        target = self.target_of(message)
        if sum(place.nbytes for place in places) < target.nbytes:
            ctypes.memset(address_of(target), 0, target.nbytes)
        read_memory(self.near[peer], places, target)
        # First the return: whatever this rank tells once it has the bytes comes after it.
        self._links[peer].post(Message(Topic.RETURN, message.identity))
        self.answered(message)

    def ended(self, peer: int) -> None:
        """A rank is gone: what was asked of it cannot come."""
        with self._state:
            lost = [pull for pull in self._pulls.values() if pull.peer == peer]
            self._pulls = {k: p for k, p in self._pulls.items() if p.peer != peer}
        for pull in lost:
            pull.future.part_done(self._watchdog.gone(peer, self._words(pull)))
