"""Who runs: micro-batches that pass the units of a model in turns ([layer_major])."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from zeepo.chunks.chunk import Chunk, Kind
from zeepo.engine.managed import Home
from zeepo.errors import UnsupportedError

INSTEAD = "Train the micro-batches one after the other, each with its own backward()"


class _Stopped(BaseException):
    """Another micro-batch failed: this one is not needed any more."""


class Turns:
    """Who runs: one of several threads, each a micro-batch."""

    def __init__(self, count: int, buffers: Sequence[Tensor]):
        self._count = count
        self._buffers = buffers
        self._versions = [buffer._version for buffer in buffers]
        self._last_changed_by = [0] * len(buffers)
        """Of each buffer, the last micro-batch that changed it."""
        self._changed = threading.Condition()
        self._current = -1
        self._done = [False] * count
        self._number_of: dict[int, int] = {}
        """Thread -> its micro-batch."""
        self._unit_of: list[int | None] = [None] * count
        """The PARAM chunk that each is in."""
        self._contributed: list[set[int]] = [set() for _ in range(count)]
        self.failure: BaseException | None = None

    def run(self, number: int, work: Callable[[int], None]) -> None:
        """A micro-batch's own thread: waits for its turn, and passes it on at the end."""
        with self._changed:
            self._number_of[threading.get_ident()] = number
        try:
            self._wait_for(number)
            work(number)
            self._check_buffers(number)
        except _Stopped:
            return
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            with self._changed:
                self._done[number] = True
                self._pass_on(number)

    @property
    def is_last(self) -> bool:
        """Whether the running thread's micro-batch is the last one."""
        return self._number_of.get(threading.get_ident()) == self._count - 1

    def about_to_use(self, chunks: Sequence[Chunk]) -> None:
        """Between two units the others get their turn."""
        number = self._number_of.get(threading.get_ident())
        unit = next((c.key for c in chunks if c.kind is Kind.PARAM), None)
        if number is None or unit is None or unit == self._unit_of[number]:
            return
        self._unit_of[number] = unit
        self._check_buffers(number)
        with self._changed:
            self._pass_on(number)
        self._wait_for(number)

    def _pass_on(self, number: int) -> None:
        after = [(number + step) % self._count for step in range(1, self._count + 1)]
        self._current = next((n for n in after if not self._done[n]), number)
        self._changed.notify_all()

    def _wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == number)
        if self.failure is not None:
            raise _Stopped

    def begin(self) -> None:
        """All threads are there: the first micro-batch has its turn."""
        with self._changed:
            self._pass_on(-1)

    def stop(self, error: BaseException, is_alive: Sequence[bool]) -> None:
        """Nobody goes on; some threads may be over, or were never started."""
        with self._changed:
            self.failure = error
            self._done = [d or not a for d, a in zip(self._done, is_alive, strict=True)]
            if self._current < 0 or self._done[self._current]:
                self._pass_on(self._current)

    def _check_buffers(self, number: int) -> None:
        """At the end of a turn: what it changed must not have been changed by a later micro-batch.

        Of each unit, forwards come in the order of the micro-batches; recomputed ones do not, nor
        do those of a layer that is used several times.
        """
        for index, buffer in enumerate(self._buffers):
            if buffer._version == self._versions[index]:
                continue
            self._versions[index] = buffer._version
            if self._last_changed_by[index] > number:
                raise UnsupportedError(
                    f"micro-batch {number} changes a buffer of shape {tuple(buffer.shape)} after "
                    f"micro-batch {self._last_changed_by[index]} did (batch norm inside activation "
                    "checkpointing, or used several times): session.accumulate does so in another "
                    f"order than micro-batch after micro-batch. {INSTEAD}."
                )
            self._last_changed_by[index] = number

    def contributes(self, home: Home) -> None:
        """[Note: order] A gradient arrives: those of all micro-batches before it must have."""
        number = self._number_of.get(threading.get_ident())
        if number is None:
            return
        if id(home) in self._contributed[number]:
            raise UnsupportedError(
                f"{home.name} got two gradients from micro-batch {number} (reentrant "
                "checkpointing): session.accumulate would add them in another order. Use "
                f"use_reentrant=False. {INSTEAD} otherwise."
            )
        self._contributed[number].add(id(home))
        for earlier in range(number):
            if not self._done[earlier] and id(home) not in self._contributed[earlier]:
                raise UnsupportedError(
                    f"micro-batch {number} has a gradient for {home.name} before micro-batch "
                    f"{earlier}: they took different ways through the model, and "
                    f"session.accumulate would add their gradients in another order. {INSTEAD}."
                )
