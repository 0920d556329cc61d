"""What this rank gives when others ask: now, or when it has it. Works in the links' threads."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

from zeepo.sharding.link import Link
from zeepo.sharding.messages import Message, Topic
from zeepo.sharding.neighbour import address_of
from zeepo.sharding.requests import Loan, Provider, Reply, Wanted, joined


class Answers:
    """Requests of other ranks, those that wait, and what is lent."""

    def __init__(
        self,
        links: dict[int, Link],
        ended: dict[int, str],
        state: threading.Condition,
        on_sent: Callable[[int, int], None],
    ):
        """`ended`: ranks that are gone; `on_sent` is told kind and bytes of every answer."""
        self.provider: Provider | None = None
        """Until there is one, and `look_again` is called, requests wait."""
        self._links = links
        self._ended = ended
        self._state = state
        self._on_sent = on_sent
        self._loans: dict[tuple[int, int], Loan] = {}
        self._parked: list[tuple[int, Message]] = []
        self._num_changes = 0

    def look_again(self) -> None:
        """Something changed: requests that could not be answered may be answered now."""
        with self._state:
            self._num_changes += 1
            parked, self._parked = self._parked, []
        for peer, message in parked:
            self.answer(peer, message)

    def answer(self, peer: int, message: Message) -> None:
        """Somebody asks."""
        kind, key, version, low, high, can_read = message.arguments[:6]

        def reply(loan: Loan | Exception) -> None:
            if isinstance(loan, Exception):
                reason = bytearray(str(loan).encode())
                failure = Message(Topic.FAIL, message.identity, (), len(reason))
                self._links[peer].post(failure, memoryview(reason))
                return
            self._on_sent(kind, high - low)
            if can_read:
                self._lend(peer, message.identity, kind, loan)
            else:
                memory = joined(loan.pieces, high - low)
                data = Message(Topic.DATA, message.identity, (kind,), memory.nbytes)
                self._links[peer].post(data, memory, loan.give_back)

        wanted = Wanted(kind, key, version, low, high)
        while True:
            changes = self._num_changes
            if self.provider is not None and self.provider(wanted, reply):
                return
            with self._state:
                if changes == self._num_changes:  # else: it may have come while we looked
                    self._parked.append((peer, message))
                    return

    def _lend(self, peer: int, identity: int, kind: int, loan: Loan) -> None:
        with self._state:
            is_gone = peer in self._ended
            if not is_gone:
                self._loans[peer, identity] = loan
        if is_gone:
            loan.give_back()
            return
        places = [(offset, address_of(memory), memory.nbytes) for offset, memory in loan.pieces]
        table = memoryview(bytearray(array("q", [n for place in places for n in place]).tobytes()))
        self._links[peer].post(Message(Topic.LOAN, identity, (kind,), table.nbytes), table)

    def returned(self, peer: int, identity: int) -> None:
        """A loan comes back."""
        with self._state:
            loan = self._loans.pop((peer, identity), None)
        if loan is not None:
            loan.give_back()

    def ended(self, peer: int) -> None:
        """A rank is gone: nobody copies from what was lent to it any more."""
        with self._state:
            loans = [loan for (to, _), loan in self._loans.items() if to == peer]
            self._loans = {k: loan for k, loan in self._loans.items() if k[0] != peer}
            self._parked = [(to, message) for to, message in self._parked if to != peer]
        for loan in loans:
            loan.give_back()

    def stop(self) -> None:
        """What could be given is about to go: from now on who asks is refused."""

        def refuse(wanted: Wanted, reply: Reply) -> bool:
            reply(ConnectionAbortedError("it closes its session"))
            return True

        self.provider = refuse
        self.look_again()
