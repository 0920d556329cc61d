"""What ranks ask of each other, and the future of an answer. No threads, no transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol


class Watch(Protocol):
    """Who waits for ranks, and watches them meanwhile."""

    def wait_for(self, future: PeerFuture) -> None: ...


@dataclass(frozen=True)
class Wanted:
    """Bytes of another rank: which ones, and of which version."""

    kind: int
    key: int
    version: int
    low: int
    high: int


@dataclass(frozen=True)
class Loan:
    """Memory that stays as it is until it is given back; what no piece covers is zero."""

    pieces: Sequence[tuple[int, memoryview]]
    """(offset in what was asked for, bytes)"""
    give_back: Callable[[], None]


Reply = Callable[[Loan | Exception], None]
Provider = Callable[[Wanted, Reply], bool]
"""Answers a request, at once or later; False when that version is not there yet."""


class PeerFuture(Future[None]):
    """A transfer in parts, from other ranks and perhaps a disk; waiting for it watches them."""

    def __init__(self, watch: Watch, what: str, num_parts: int):
        super().__init__()
        self.what = what
        self.waits_for: set[int] = set()
        """Ranks that have not answered yet."""
        self._watch = watch
        self._num_parts_left = num_parts
        self._part_lock = threading.Lock()
        if num_parts == 0:
            self.set_result(None)

    def part_done(self, error: BaseException | None = None) -> None:
        """One part has come, or cannot come. Done when none is under way any more."""
        with self._part_lock:
            self._num_parts_left -= 1
            self._error = self._error or error
            is_last = self._num_parts_left == 0
        if is_last:
            if self._error is not None:
                self.set_exception(self._error)
            else:
                self.set_result(None)

    _error: BaseException | None = None

    def result(self, timeout: float | None = None) -> None:
        self._watch.wait_for(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._watch.wait_for(self)
        return super().exception(timeout)


@dataclass
class Pull:
    """One request that is under way."""

    peer: int
    wanted: Wanted
    target: memoryview
    future: PeerFuture


@dataclass
class Counters:
    """What this rank sent and waited for."""

    bytes_sent: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes of this rank that others took."""
    bytes_received: dict[str, int] = field(default_factory=dict)
    seconds_waited: dict[str, float] = field(default_factory=dict)
    """What was waited for (mostly a unit) -> seconds."""


def joined(pieces: Sequence[tuple[int, memoryview]], nbytes: int) -> memoryview:
    """The pieces as one run of bytes; without a copy where there is only one."""
    if len(pieces) == 1 and pieces[0][1].nbytes == nbytes:
        return pieces[0][1]
    whole = bytearray(nbytes)
    for offset, memory in pieces:
        whole[offset : offset + memory.nbytes] = memory
    return memoryview(whole)
