"""The other ranks: asking them for bytes, telling them facts, and noticing when they are gone.

There is one way for bytes to move between ranks: who needs them asks who has them. An answer needs
only the owner's link threads, never its training thread, so ranks may run different modules, or a
different number of them, and nothing hangs. On one host the bytes are copied straight out of the
owner's memory; otherwise they are sent.

[Note: waiting for ranks]
The training thread waits in `wait_for` alone. There it lets go of the session's lock, which the
link threads need to look up what others ask for, and watches the ranks it waits for: one that is
gone, or silent for longer than `patience_seconds`, is named in a RankError.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from zeepo.errors import RankError
from zeepo.sharding.link import Link, first_words
from zeepo.sharding.messages import Message, Topic
from zeepo.sharding.neighbour import Place, address_of, allow_reading, host_name, read_memory
from zeepo.sharding.requests import Counters, Loan, PeerFuture, Provider, Pull, Wanted, joined

CHECK_SECONDS = 0.2
POLL_SECONDS = 0.0005
SILENT_SECONDS = 5.0
"""A rank that is not heard of for this long is named; training goes on when it wakes up."""
STRAGGLER_SECONDS = 1.0
PHASES = ("outside a step", "in forward", "in backward", "in optimizer.step", "closing")


class Network:
    """The ranks of one session."""

    def __init__(
        self,
        group: Any,
        lock: threading.RLock,
        patience_seconds: float,
        kinds: dict[int, str],
    ):
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self.peers = [r for r in range(self.num_ranks) if r != self.rank]
        self.counters = Counters()
        self.provider: Provider | None = None
        """Until there is one, and `look_again` is called, requests wait."""
        self.on_straggler: Callable[[int, str, float], None] = lambda rank, what, seconds: None
        self.on_silent: Callable[[str], None] = lambda message: None
        self.position = (0, 0)
        """Step and phase of the training thread, for the others to read."""
        self._kinds = kinds
        self._lock: Any = lock
        self._patience_seconds = patience_seconds
        self._state = threading.Condition()
        """Guards everything below; held for moments only, with no other lock inside."""
        self._identities = itertools.count(1)
        self._pulls: dict[int, Pull] = {}
        self._loans: dict[tuple[int, int], Loan] = {}
        self._parked: list[tuple[int, Message]] = []
        self._num_changes = 0
        self._notes: dict[tuple[int, int], dict[int, bytes]] = {}
        self._arriving: dict[int, bytearray] = {}
        self._positions: dict[int, tuple[int, int]] = {}
        self._ended: dict[int, str] = {}
        self._near: dict[int, int] = {}
        """Ranks whose memory we can read -> their process."""
        self._named_silent: set[int] = set()
        self._links = {peer: Link(group, peer, self) for peer in self.peers}
        for link in self._links.values():
            link.start()

    # -- asking -----------------------------------------------------------------------------------

    def pull(self, peer: int, wanted: Wanted, target: memoryview, future: PeerFuture) -> None:
        """Ask a rank for bytes, as one part of `future`."""
        identity = next(self._identities)
        with self._state:
            is_gone = peer in self._ended
            if not is_gone:
                future.waits_for.add(peer)
                self._pulls[identity] = Pull(peer, target, future)
        if is_gone:
            future.part_done(self._gone(peer, future.what))
            return
        can_read = int(peer in self._near)
        self._links[peer].post(
            Message(
                Topic.PULL,
                identity,
                (wanted.kind, wanted.key, wanted.version, wanted.low, wanted.high, can_read),
            )
        )

    def look_again(self) -> None:
        """Something changed: requests that could not be answered may be answered now."""
        with self._state:
            self._num_changes += 1
            parked, self._parked = self._parked, []
        for peer, message in parked:
            self._answer(peer, message)

    def _answer(self, peer: int, message: Message) -> None:
        kind, key, version, low, high, can_read = message.arguments[:6]

        def reply(loan: Loan | Exception) -> None:
            if isinstance(loan, Exception):
                reason = bytearray(str(loan).encode())
                failure = Message(Topic.FAIL, message.identity, (), len(reason))
                self._links[peer].post(failure, memoryview(reason))
                return
            self._count(self.counters.bytes_sent, kind, high - low)
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

    # -- telling ----------------------------------------------------------------------------------

    def tell(self, subject: int, number: int, fact: bytes) -> None:
        """Let every rank know a fact, by subject and number."""
        note = Message(Topic.NOTE, 0, (subject, number), len(fact))
        for link in self._links.values():
            link.post(note, memoryview(bytearray(fact)) if fact else None)

    def collect(self, subject: int, number: int, fact: bytes, what: str) -> list[bytes]:
        """Tell a fact and wait for everybody's: the same list, by rank, on every rank."""
        self.tell(subject, number, fact)
        others = self.await_all(subject, number, what)
        return [fact if r == self.rank else others[r] for r in range(self.num_ranks)]

    def await_all(self, subject: int, number: int, what: str) -> dict[int, bytes]:
        """Wait until every other rank has told."""
        started = time.monotonic()
        missing: set[int] = set()
        with self._let_go():
            while True:
                with self._state:
                    told = self._notes.get((subject, number), {})
                    if len(told) == len(self.peers):
                        del self._notes[subject, number]
                        break
                    missing = {peer for peer in self.peers if peer not in told}
                    gone = missing & self._ended.keys()
                    if gone:
                        raise self._gone(min(gone), what)
                    self._state.wait(CHECK_SECONDS)
                self._check_silent(missing, what)
        self._note_wait(missing, what, started)
        return told

    # -- waiting ----------------------------------------------------------------------------------

    def wait_for(self, future: PeerFuture) -> None:
        """[Note: waiting for ranks]"""
        if future.done():
            return
        started = time.monotonic()
        waits_for = set(future.waits_for)
        with self._let_go():
            while not future.done():
                try:
                    Future.exception(future, CHECK_SECONDS)
                except TimeoutError:
                    self._check_silent(future.waits_for, future.what)
        self._note_wait(waits_for, future.what, started)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something the link threads do for the other ranks."""
        with self._let_go():
            while not is_so():
                with self._state:
                    gone = set(self._ended)
                if gone and not is_so():
                    raise self._gone(min(gone), what)
                time.sleep(POLL_SECONDS)
                self._check_silent(self.peers, what)

    @contextmanager
    def _let_go(self) -> Iterator[None]:
        """Without the session's lock, however often this thread holds it."""
        if not self._lock._is_owned():
            yield
            return
        held = self._lock._release_save()
        try:
            yield
        finally:
            self._lock._acquire_restore(held)

    def _note_wait(self, peers: Iterable[int], what: str, started: float) -> None:
        seconds = time.monotonic() - started
        waited = self.counters.seconds_waited
        waited[what] = waited.get(what, 0.0) + seconds
        if seconds > STRAGGLER_SECONDS:
            for peer in peers:
                self.on_straggler(peer, what, seconds)

    def _check_silent(self, peers: Iterable[int], what: str) -> None:
        now = time.monotonic()
        for peer in sorted(peers):
            silent = now - self._links[peer].last_heard
            if silent > self._patience_seconds:
                raise RankError(
                    f"rank {self.rank} waits for rank {peer} ({what}), which has not been heard of "
                    f"for {silent:.1f} s; it was {self._where(peer)}. It hangs, is stopped, or the "
                    "network is cut. Look at that rank; raise patience if it may be slow."
                )
            if silent > SILENT_SECONDS and peer not in self._named_silent:
                self._named_silent.add(peer)
                self.on_silent(
                    f"rank {self.rank} waits for rank {peer} ({what}), which has not been heard of "
                    f"for {silent:.1f} s; it was {self._where(peer)}. Training goes on when it "
                    f"wakes up; after {self._patience_seconds:.0f} s it is given up."
                )

    def _where(self, peer: int) -> str:
        step, phase = self._positions.get(peer, (0, 0))
        return f"{PHASES[phase]}, step {step}"

    def _gone(self, peer: int, what: str) -> RankError:
        return RankError(
            f"rank {self.rank} waits for rank {peer} ({what}), but {self._ended[peer]}; it was "
            f"{self._where(peer)}. Look at what rank {peer} printed last, and start again from the "
            "last checkpoint."
        )

    # -- what arrives (in the links' threads) -----------------------------------------------------

    def place_for(self, peer: int, message: Message) -> memoryview:
        if message.topic is Topic.DATA:
            with self._state:
                return self._pulls[message.identity].target
        room = bytearray(message.payload_bytes)
        self._arriving[peer] = room
        return memoryview(room)

    def receive(self, peer: int, message: Message) -> None:
        self._named_silent.discard(peer)
        self._positions[peer] = message.position
        if message.topic is Topic.NOTE:
            subject, number = message.arguments[:2]
            fact = self._what_followed(peer, message)
            with self._state:
                self._notes.setdefault((subject, number), {})[peer] = fact
                self._state.notify_all()
        elif message.topic is Topic.PULL:
            self._answer(peer, message)
        elif message.topic is Topic.DATA:
            self._finish(message)
        elif message.topic is Topic.LOAN:
            self._copy_loan(peer, message)
        elif message.topic is Topic.FAIL:
            self._fail(peer, message)
        elif message.topic is Topic.RETURN:
            with self._state:
                loan = self._loans.pop((peer, message.identity), None)
            if loan is not None:
                loan.give_back()

    def _what_followed(self, peer: int, message: Message) -> bytes:
        return bytes(self._arriving.pop(peer)) if message.payload_bytes else b""

    def _fail(self, peer: int, message: Message) -> None:
        reason = self._what_followed(peer, message).decode()
        with self._state:
            pull = self._pulls.pop(message.identity)
        what = pull.future.what
        pull.future.part_done(RankError(f"rank {peer} cannot give {what}: {reason}"))

    def _copy_loan(self, peer: int, message: Message) -> None:
        numbers = array("q", self._what_followed(peer, message))
        places = [Place(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        with self._state:
            pull = self._pulls[message.identity]
        try:
            if sum(place.nbytes for place in places) < pull.target.nbytes:
                ctypes.memset(address_of(pull.target), 0, pull.target.nbytes)
            read_memory(self._near[peer], places, pull.target)
        except OSError as error:
            self.ended(peer, error)
            return
        self._finish(message)
        self._links[peer].post(Message(Topic.RETURN, message.identity))

    def _finish(self, message: Message) -> None:
        with self._state:
            pull = self._pulls.pop(message.identity)
        self._count(self.counters.bytes_received, message.arguments[0], pull.target.nbytes)
        pull.future.waits_for.discard(pull.peer)
        pull.future.part_done()

    def _count(self, table: dict[str, int], kind: int, nbytes: int) -> None:
        name = self._kinds[kind]
        with self._state:
            table[name] = table.get(name, 0) + nbytes

    def ended(self, peer: int, error: Exception | None) -> None:
        """Its link is over: what was asked of it fails, what was lent to it comes back."""
        reason = "it has closed its session"
        if error is not None:
            reason = f"its connection broke ({first_words(error)})"
        with self._state:
            self._ended.setdefault(peer, reason)
            lost = [pull for pull in self._pulls.values() if pull.peer == peer]
            self._pulls = {k: p for k, p in self._pulls.items() if p.peer != peer}
            loans = [loan for (to, _), loan in self._loans.items() if to == peer]
            self._loans = {k: loan for k, loan in self._loans.items() if k[0] != peer}
            self._state.notify_all()
        for pull in lost:
            pull.future.part_done(self._gone(peer, pull.future.what))
        for loan in loans:
            loan.give_back()

    # -- beginning and end ------------------------------------------------------------------------

    def meet(self, subject: int) -> None:
        """Find out which ranks share this host, by trying."""
        allow_reading()
        secret = bytearray(os.urandom(16))
        address = address_of(memoryview(secret))
        card = struct.pack("<qq16s", os.getpid(), address, bytes(secret)) + host_name()
        cards = self.collect(subject, 0, card, "the start")
        for peer in self.peers:
            pid, where, expected = struct.unpack("<qq16s", cards[peer][:32])
            seen = bytearray(16)
            if cards[peer][32:] == host_name():
                try:
                    read_memory(pid, [Place(0, where, 16)], memoryview(seen))
                except OSError:
                    continue  # not allowed here: bytes are sent instead
                if seen == expected:
                    self._near[peer] = pid
        self.collect(subject, 1, b"", "the start")  # the secret stays until all have looked

    @property
    def bytes_posted(self) -> int:
        """What was given to the process group, headers included."""
        return sum(link.bytes_sent for link in self._links.values())

    def close(self) -> bool:
        """Say goodbye and wait for the others to do so. Whether all did."""
        for link in self._links.values():
            link.post(Message(Topic.BYE))
        deadline = time.monotonic() + self._patience_seconds
        joined = [link.join(deadline - time.monotonic()) for link in self._links.values()]
        return all(joined)
