"""Which ranks are heard of, what they wait for, and when waiting for them makes no sense any more.

A wait for other ranks ends in one of these ways, and never goes on without a word:

- what is waited for comes. If that took long, the rank that was last is named, with the seconds
  it cost, on stderr (not more often than every `REPORT_SECONDS`) and as an event.
- a rank is gone, or says that it will not train on: RankError at once.
- a rank is silent: named after `SILENT_SECONDS`, RankError after `patience_seconds`. A process that
  was stopped itself has heard nobody meanwhile, and blames nobody for it.
- ranks wait for each other ([Note: mutual waits]): RankError.
- a rank lives but does not come: named again and again; RankError after `stall_seconds`.

[Note: mutual waits]
Who waits for longer than a moment tells the others for what (WAIT), and when it goes on (GO).
Messages of one rank arrive in order, so if a rank waits for a fact that we have not told, while we
wait for one of its, neither can go on: they called backward() and optimizer.step() in another
order, or not equally often. Any other circle of waits shows in that all ranks wait and nothing but
beats has passed for `patience_seconds`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from zeepo import events
from zeepo.errors import RankError

TICK_SECONDS = 0.25
STARVED_SECONDS = 1.5
"""Ticks that are further apart mean that this process was stopped, or got no time."""
SILENT_SECONDS = 5.0
"""A rank that is not heard of for this long is named; training goes on when it wakes up."""
ANNOUNCE_SECONDS = 0.2
"""A wait that lasts longer is told to the others."""
MUTUAL_SECONDS = 1.0
"""Waits that exclude each other are named when they have lasted this long."""
STRAGGLER_SECONDS = 1.0
"""A wait that lasts longer is reported."""
REPORT_SECONDS = 10.0


class Phase(IntEnum):
    """Where a training thread is."""

    START = 0
    FORWARD = 1
    END_OF_BACKWARD = 2
    STEP = 3
    CLOSING = 4
    BACKWARD = 5


PHASES = {
    Phase.START: "before its first step",
    Phase.FORWARD: "before the end of a forward",
    Phase.END_OF_BACKWARD: "at the end of backward",
    Phase.STEP: "in optimizer.step",
    Phase.CLOSING: "closing",
    Phase.BACKWARD: "in backward",
}

Fact = tuple[int, int]
"""Subject and number."""


@dataclass
class Wait:
    """Something of other ranks that a training thread waits for."""

    what: str
    fact: Fact | None = None
    words: Callable[[int], str] | None = None
    """Of a rank: what exactly is waited for."""
    since: float = field(default_factory=lambda: time.monotonic())
    still_since: float = field(default_factory=lambda: time.monotonic())
    """When bytes or facts moved last."""
    num_moved: int = 0
    """How many had moved by then."""
    num_announced: int = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def still_seconds(self) -> float:
        return time.monotonic() - self.still_since


class Watchdog:
    """What this rank knows of the others' health."""

    def __init__(
        self,
        rank: int,
        peers: Collection[int],
        patience_seconds: float,
        stall_seconds: float,
        counted: Collection[int],
    ):
        self.patience_seconds = patience_seconds
        self.position = (0, 0)
        """Step and phase of our training thread."""
        self.ended: dict[int, str] = {}
        """Ranks that nothing more comes from, and why."""
        self.leaving: dict[int, str] = {}
        """Ranks that do not train on, and why."""
        self.announce: Callable[[Wait | None], None] = lambda wait: None
        """Tells the other ranks what we wait for."""
        self.give_up: Callable[[int, str], None] = lambda rank, why: None
        """Called with a rank that has been silent for too long."""
        self.num_moved = 0
        """Messages and pieces that came, but for those that only tell how a rank is."""
        self._rank = rank
        self._peers = peers
        self._stall_seconds = stall_seconds
        self._counted = counted
        self._positions: dict[int, tuple[int, int]] = {}
        self._waits: dict[int, Wait] = {}
        self._told: deque[Fact] = deque(maxlen=64)
        """Facts we told; a rank that waits for an older one of them has it on its way."""
        now = time.monotonic()
        self._last_heard = dict.fromkeys(peers, now)
        self._last_tick = now
        self._named_silent: set[int] = set()
        self._next_report: dict[int, float] = {}
        self._seconds_cost: dict[int, float] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._tick, name="zeepo-watchdog", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    # -- what is known (from the links' threads) --------------------------------------------------

    def _tick(self) -> None:
        while not self._is_closed.wait(TICK_SECONDS):
            now = time.monotonic()
            if now - self._last_tick > STARVED_SECONDS:  # nobody could be heard meanwhile
                self._last_heard = dict.fromkeys(self._peers, now)
            self._last_tick = now

    def heard(self, peer: int, position: tuple[int, int] | None = None) -> None:
        """Something of this rank has arrived."""
        self._last_heard[peer] = time.monotonic()
        self._named_silent.discard(peer)
        if position is not None:
            self._positions[peer] = position

    def peer_waits(self, peer: int, wait: Wait | None) -> None:
        """A rank says what it waits for, or that it goes on."""
        before = self._waits.pop(peer, None)
        if wait is not None:
            if before is not None and (before.what, before.fact) == (wait.what, wait.fact):
                wait.since = before.since
            self._waits[peer] = wait

    def told(self, subject: int, number: int) -> None:
        """We told a fact."""
        self._told.append((subject, number))

    def where(self, peer: int) -> str:
        """What a rank was doing when it was last heard of."""
        step, phase = self._positions.get(peer, (0, 0))
        wait = self._waits.get(peer)
        waiting = f", waiting for {self._words(wait)}" if wait is not None else ""
        return f"{PHASES[Phase(phase)]}, step {step}{waiting}"

    def gone(self, peer: int, what: str) -> RankError:
        """The error when what is waited for cannot come."""
        why = self.leaving.get(peer) or self.ended.get(peer, "it does not train on")
        return RankError(
            f"rank {self._rank} waits for rank {peer} ({what}), but {why}; it was "
            f"{self.where(peer)}. Look at what rank {peer} printed last, and start again from the "
            "last checkpoint."
        )

    # -- waiting (in the training thread) ---------------------------------------------------------

    def check(self, wait: Wait, peers: Iterable[int]) -> None:
        """To be called a few times a second while these ranks are waited for."""
        pending = sorted(peers)
        self._announce(wait)
        for peer in pending:
            self._check_silent(wait, peer)
            self._check_leaving(wait, peer)
            if wait.fact is not None:
                self._check_mutual(wait, wait.fact, peer)
        self._check_circle(wait)
        if wait.seconds > SILENT_SECONDS and pending:
            self._report(pending[0], f"has waited {wait.seconds:.1f} s so far", wait)
            if wait.seconds > self._stall_seconds:
                raise RankError(
                    f"rank {self._rank} has waited {wait.seconds:.0f} s for rank {pending[0]} "
                    f"({self._words(wait, pending[0])}), which lives but does not come; it is "
                    f"{self.where(pending[0])}. Look at what that rank does."
                )

    def over(self, wait: Wait, last: Iterable[int]) -> None:
        """What was waited for has come, from `last` at last."""
        seconds = wait.seconds
        if seconds <= STRAGGLER_SECONDS:
            return
        for peer in sorted(last):
            cost = self._seconds_cost[peer] = self._seconds_cost.get(peer, 0.0) + seconds
            events.emit(
                "straggler",
                rank=self._rank,
                straggler=peer,
                what=wait.what,
                seconds=seconds,
                seconds_in_all=cost,
            )
            self._report(peer, f"waited {seconds:.1f} s ({cost:.1f} s in all)", wait)

    def _announce(self, wait: Wait) -> None:
        """Tell the others, and again when something has moved meanwhile."""
        has_moved = wait.num_moved != self.num_moved
        if has_moved:
            wait.num_moved = self.num_moved
            wait.still_since = time.monotonic()
        is_new = not wait.num_announced and wait.seconds >= ANNOUNCE_SECONDS
        if is_new or (has_moved and wait.seconds > wait.num_announced > 0):
            wait.num_announced += 1
            self.announce(wait)

    def _report(self, peer: int, what_happened: str, wait: Wait) -> None:
        now = time.monotonic()
        if now < self._next_report.get(peer, 0.0) or peer in self._named_silent:
            return
        self._next_report[peer] = now + REPORT_SECONDS
        events.warn(
            f"rank {self._rank} {what_happened} for rank {peer} ({self._words(wait, peer)}); it is "
            f"{self.where(peer)}."
        )

    def _silent_seconds(self, peer: int) -> float:
        now = time.monotonic()
        if now - self._last_tick > STARVED_SECONDS:
            return 0.0
        return now - self._last_heard[peer]

    def _check_silent(self, wait: Wait, peer: int) -> None:
        silent = self._silent_seconds(peer)
        if silent <= min(SILENT_SECONDS, self.patience_seconds):
            return
        text = (
            f"rank {self._rank} waits for rank {peer} ({self._words(wait, peer)}), which has not "
            f"been heard of for {silent:.1f} s; it was {self.where(peer)}."
        )
        if silent > self.patience_seconds:
            self.give_up(peer, f"it has not been heard of for {silent:.1f} s")
            raise RankError(
                f"{text} It hangs, is stopped, or the network is cut. Look at that rank; if it may "
                "be silent for so long, set ZEEPO_TUNING_RANK_PATIENCE_SECONDS."
            )
        if peer not in self._named_silent:
            self._named_silent.add(peer)
            events.emit("rank_silent", rank=self._rank, silent=peer, what=wait.what, seconds=silent)
            events.warn(
                f"{text} Training goes on when it wakes up; after {self.patience_seconds:.0f} s it "
                "is given up."
            )

    def _check_leaving(self, wait: Wait, peer: int) -> None:
        """Who leaves tells no more facts but that it closes; bytes it may still give."""
        if peer not in self.leaving:
            return
        is_closing = self.position[1] == Phase.CLOSING
        is_lost = not is_closing if wait.fact is not None else wait.still_seconds > SILENT_SECONDS
        if is_lost:
            raise self.gone(peer, self._words(wait, peer))

    def _check_mutual(self, wait: Wait, fact: Fact, peer: int) -> None:
        """[Note: mutual waits] Who closes is the more patient: the others come to close as well."""
        theirs = self._waits.get(peer)
        if theirs is None or theirs.fact is None or theirs.fact == fact:
            return
        is_closing = self.position[1] == Phase.CLOSING
        lasted = min(theirs.seconds, wait.seconds)
        if theirs.fact in self._told or is_closing or lasted < MUTUAL_SECONDS:
            return
        raise RankError(
            f"rank {self._rank} is at {self._words(wait)} while rank {peer} is at "
            f"{self._words(theirs)}, and each waits for the other: all ranks have to call "
            "backward(), clip and optimizer.step() equally often and in the same order, and close "
            "when all have done so."
        )

    def _check_circle(self, wait: Wait) -> None:
        """All wait, and nothing moves."""
        waits = [self._waits.get(peer) for peer in self._peers if peer not in self.ended]
        theirs = [w for w in waits if w is not None]
        if len(theirs) < len(waits) or not theirs:
            return
        lasted = min(w.still_seconds for w in (wait, *theirs))
        if lasted > self.patience_seconds:
            places = [f"rank {self._rank}: {self._words(wait)}"]
            places += [f"rank {peer}: {self._words(w)}" for peer, w in sorted(self._waits.items())]
            raise RankError(
                f"all ranks have waited for each other for {lasted:.0f} s ({'; '.join(places)}). "
                "They do not do the same things in the same order."
            )

    def _words(self, wait: Wait, peer: int | None = None) -> str:
        if peer is not None and wait.words is not None:
            return wait.words(peer)
        if wait.fact is not None and wait.fact[0] in self._counted:
            return f"{wait.what} {wait.fact[1]}"
        return wait.what
