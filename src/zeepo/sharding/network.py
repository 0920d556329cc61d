"""The other ranks: asking them for bytes, telling them facts, and noticing when they are gone.

There is one way for bytes to move between ranks: who needs them asks who has them. An answer needs
only the owner's link threads, never its training thread, so ranks may run different modules, or a
different number of them, and nothing hangs. On one host the bytes are copied straight out of the
owner's memory; otherwise they are sent.

[Note: waiting for ranks]
The training thread waits in `_waiting` alone. There it lets go of the session's lock, which the
link threads need to look up what others ask for, and watches the ranks it waits for ([watchdog]).
When a wait fails, the others are told that this rank leaves, and why.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from zeepo.errors import RankError
from zeepo.sharding.answers import Answers
from zeepo.sharding.asking import Asking
from zeepo.sharding.link import Link, first_words
from zeepo.sharding.messages import Message, Topic
from zeepo.sharding.neighbour import Card, process_of
from zeepo.sharding.requests import Counters, PeerFuture, Provider, Wanted
from zeepo.sharding.watchdog import Phase, Wait, Watchdog

CHECK_SECONDS = 0.2
GOODBYE_SECONDS = 2.0
"""How long it may take to say goodbye when something is wrong."""
STALL_SECONDS = 1800.0
HEALTH = (Topic.BEAT, Topic.WAIT, Topic.GO)
"""Messages that only tell how a rank is."""


class Network:
    """The ranks of one session."""

    def __init__(
        self,
        group: Any,
        lock: threading.RLock,
        patience_seconds: float,
        kinds: dict[int, str],
        counted: Collection[int] = (),
    ):
        """`counted`: subjects of facts whose number means something to the user."""
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self.peers = [r for r in range(self.num_ranks) if r != self.rank]
        self.counters = Counters()
        self.on_dead: Callable[[int], None] = lambda rank: None
        """Called once with a rank whose connection broke, before anybody is told."""
        self.watchdog = Watchdog(self.rank, self.peers, patience_seconds, STALL_SECONDS, counted)
        self.watchdog.announce = self._announce
        self.watchdog.give_up = self._give_up
        self._kinds = kinds
        self._lock: Any = lock
        self._state = threading.Condition()
        """Guards everything below; held for moments only, with no other lock inside."""
        self._notes: dict[tuple[int, int], dict[int, bytes]] = {}
        self._arriving: dict[int, bytearray] = {}
        self._ended = self.watchdog.ended
        self._dead: list[int] = []
        """Ranks that ended without a goodbye, and that nobody has looked after yet."""
        self._given_up: set[int] = set()
        """Ranks that were silent for too long: their connection is still there."""
        self._has_left = False
        self._is_broken = False
        self._links = {peer: Link(group, peer, self) for peer in self.peers}
        sent, received = self.counters.bytes_sent, self.counters.bytes_received
        self.answers = Answers(self._links, self._ended, self._state, self._counting(sent))
        self.asking = Asking(self._links, self.watchdog, self._state, self._counting(received))
        for link in self._links.values():
            link.start()
        self.at_good_end: Callable[[], None] | None = None
        """Instead of leaving, when the script ends without an error and the session is open."""
        atexit.register(self._at_exit)

    @property
    def provider(self) -> Provider | None:
        """Who answers when others ask us."""
        return self.answers.provider

    @provider.setter
    def provider(self, provider: Provider) -> None:
        self.answers.provider = provider

    @property
    def position(self) -> tuple[int, int]:
        """Step and phase of the training thread, for the others to read."""
        return self.watchdog.position

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self.watchdog.position = position

    # -- asking -----------------------------------------------------------------------------------

    def pull(self, peer: int, wanted: Wanted, target: memoryview, future: PeerFuture) -> None:
        """Ask a rank for bytes, as one part of `future`."""
        self.asking.pull(peer, wanted, target, future)

    def look_again(self) -> None:
        """Something changed: what others ask for may be there now."""
        self.answers.look_again()

    # -- telling ----------------------------------------------------------------------------------

    def tell(self, subject: int, number: int, fact: bytes) -> None:
        """Let every rank know a fact, by subject and number."""
        self.watchdog.told(subject, number)
        self._post_all(Message(Topic.NOTE, 0, (subject, number)), fact)

    def collect(self, subject: int, number: int, fact: bytes, what: str) -> list[bytes]:
        """Tell a fact and wait for everybody's: the same list, by rank, on every rank."""
        self.tell(subject, number, fact)
        others = self.await_all(subject, number, what)
        return [fact if r == self.rank else others[r] for r in range(self.num_ranks)]

    def await_all(self, subject: int, number: int, what: str) -> dict[int, bytes]:
        """Wait until every other rank has told."""
        missing: set[int] = set()
        with self._waiting(Wait(what, (subject, number))) as wait:
            while True:
                with self._state:
                    told = self._notes.get((subject, number), {})
                    if len(told) == len(self.peers):
                        del self._notes[subject, number]
                        break
                    missing = {peer for peer in self.peers if peer not in told}
                    gone = missing & self._ended.keys()
                    if gone:
                        raise self.watchdog.gone(min(gone), what)
                    self._state.wait(CHECK_SECONDS)
                self.watchdog.check(wait, missing)
        self._note_wait(wait, missing)
        return told

    # -- waiting ----------------------------------------------------------------------------------

    def wait_for(self, future: PeerFuture) -> None:
        """[Note: waiting for ranks]"""
        if not future.done():
            self._wait_for(future)
        error = Future.exception(future)
        if isinstance(error, RankError):
            self.leave(_gave_up(error))

    def _wait_for(self, future: PeerFuture) -> None:
        pending = set(future.waits_for)
        words = partial(self.asking.words_of, future)
        with self._waiting(Wait(future.what, words=words)) as wait:
            while not future.done():
                try:
                    Future.exception(future, CHECK_SECONDS)
                except TimeoutError:
                    pending = set(future.waits_for)
                    self.watchdog.check(wait, pending)
        self._note_wait(wait, pending)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something the link threads do for the others; `look_up` when it may be so."""
        with self._waiting(Wait(what)) as wait:
            while True:
                with self._state:
                    if is_so():
                        break
                    gone = set(self._ended)
                    if gone:
                        raise self.watchdog.gone(min(gone), what)
                    self._state.wait(CHECK_SECONDS)
                self.watchdog.check(wait, self.peers)

    def look_up(self) -> None:
        """Wake who waits in `wait_until`."""
        with self._state:
            self._state.notify_all()

    @contextmanager
    def _waiting(self, wait: Wait) -> Iterator[Wait]:
        """[Note: waiting for ranks]"""
        try:
            with self._let_go():
                yield wait
        except RankError as error:
            self.leave(_gave_up(error))
            raise
        finally:
            if wait.num_announced:
                self._announce(None)

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

    def _note_wait(self, wait: Wait, last: Iterable[int]) -> None:
        waited = self.counters.seconds_waited
        waited[wait.what] = waited.get(wait.what, 0.0) + wait.seconds
        self.watchdog.over(wait, last)

    def _announce(self, wait: Wait | None) -> None:
        if wait is None:
            self._post_all(Message(Topic.GO))
        else:
            self._post_all(Message(Topic.WAIT, 0, wait.fact or ()), wait.what.encode())

    def _post_all(self, message: Message, payload: bytes = b"") -> None:
        message = replace(message, payload_bytes=len(payload))
        for link in self._links.values():
            link.post(message, memoryview(bytearray(payload)) if payload else None)

    def _give_up(self, peer: int, reason: str) -> None:
        self._given_up.add(peer)
        self.ended(peer, TimeoutError(reason))

    # -- what arrives (in the links' threads) -----------------------------------------------------

    def place_for(self, peer: int, message: Message) -> memoryview:
        if message.topic is Topic.DATA:
            return self.asking.target_of(message)
        room = bytearray(message.payload_bytes)
        self._arriving[peer] = room
        return memoryview(room)

    def receive(self, peer: int, message: Message) -> None:
        self.watchdog.heard(peer, message.position)
        self.watchdog.num_moved += message.topic not in HEALTH
        if message.topic is Topic.NOTE:
            subject, number = message.arguments[:2]
            fact = self._what_followed(peer, message)
            with self._state:
                self._notes.setdefault((subject, number), {})[peer] = fact
                self._state.notify_all()
        elif message.topic is Topic.PULL:
            self.answers.answer(peer, message)
        elif message.topic is Topic.DATA:
            self.asking.answered(message)
        elif message.topic is Topic.LOAN:
            self.asking.copy_loan(peer, message, self._what_followed(peer, message))
        elif message.topic is Topic.FAIL:
            self.asking.refused(peer, message, self._what_followed(peer, message).decode())
        elif message.topic is Topic.RETURN:
            self.answers.returned(peer, message.identity)
        elif message.topic is not Topic.BEAT:
            self._hear_of_training(peer, message)

    def heard(self, peer: int) -> None:
        self.watchdog.heard(peer)
        self.watchdog.num_moved += 1

    def _hear_of_training(self, peer: int, message: Message) -> None:
        """A rank waits, goes on, or leaves."""
        words = self._what_followed(peer, message).decode()
        if message.topic is Topic.LEAVE:
            self.watchdog.leaving[peer] = words
            with self._state:
                self._state.notify_all()
        else:
            subject, number = message.arguments[:2]
            fact = (subject, number) if subject else None
            is_waiting = message.topic is Topic.WAIT
            self.watchdog.peer_waits(peer, Wait(words, fact) if is_waiting else None)

    def _what_followed(self, peer: int, message: Message) -> bytes:
        return bytes(self._arriving.pop(peer)) if message.payload_bytes else b""

    def _counting(self, table: dict[str, int]) -> Callable[[int, int], None]:
        def count(kind: int, nbytes: int) -> None:
            name = self._kinds[kind]
            with self._state:
                table[name] = table.get(name, 0) + nbytes

        return count

    def ended(self, peer: int, error: Exception | None) -> None:
        """Its link is over: what was asked of it fails, what was lent to it comes back."""
        reason = "it has closed its session"
        if isinstance(error, TimeoutError):
            reason = str(error)
        elif error is not None:
            reason = f"its connection broke ({first_words(error)})"
        with self._state:
            if error is not None and peer not in self._ended:
                self._is_broken = True
                self._dead.append(peer)
            self._ended.setdefault(peer, reason)
            self._state.notify_all()
        self.asking.ended(peer)
        self.answers.ended(peer)

    # -- beginning and end ------------------------------------------------------------------------

    def meet(self, subject: int) -> None:
        """Find out which ranks share this host, by trying."""
        card = Card()
        cards = self.collect(subject, 0, card.encode(), "the start")
        found = {peer: process_of(cards[peer]) for peer in self.peers}
        self.asking.near = {peer: pid for peer, pid in found.items() if pid is not None}
        self.collect(subject, 1, b"", "the start")  # the card stays until all have looked
        del card

    @property
    def bytes_posted(self) -> int:
        """What was given to the process group, headers included."""
        return sum(link.bytes_sent for link in self._links.values())

    def leave(self, reason: str) -> None:
        """This rank does not train on: the others learn why, instead of waiting for it."""
        if not self._has_left:
            self._has_left = True
            self._post_all(Message(Topic.LEAVE), reason.encode())
        self._look_after_the_dead()

    def begin_closing(self) -> None:
        """From now on we take part in nothing but closing; an exception that is the reason is
        told."""
        self.position = (self.position[0], Phase.CLOSING)
        error = sys.exception()
        if error is not None:
            self.leave(f"it raised {_in_words(error)}")

    def close(self) -> bool:
        """Say goodbye and wait for the others to do so. Whether all did."""
        atexit.unregister(self._at_exit)
        self._post_all(Message(Topic.BYE))
        is_orderly = not (self._has_left or self._is_broken or self.watchdog.leaving)
        seconds = self.watchdog.patience_seconds if is_orderly else GOODBYE_SECONDS
        deadline = time.monotonic() + seconds
        joined = [  # nobody in the transport may be left when the interpreter ends
            link.join(deadline - time.monotonic(), both=peer not in self._given_up)
            for peer, link in self._links.items()
        ]
        self.watchdog.close()
        self._look_after_the_dead()
        return all(joined)

    def _look_after_the_dead(self) -> None:
        while self._dead:
            self.on_dead(self._dead.pop())

    def _at_exit(self) -> None:
        """The script ends with an open session."""
        error = getattr(sys, "last_value", None)
        if error is None and self.at_good_end is not None:
            try:
                self.at_good_end()
            except RankError as failure:
                sys.excepthook(type(failure), failure, failure.__traceback__)
            return
        how = f"with {_in_words(error)}" if error is not None else "without closing its session"
        self.leave(f"its script ended {how}")
        self.close()


def _gave_up(error: RankError) -> str:
    return f"it gave up: {str(error).split('; it was')[0].split('. ')[0]}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
