"""Which part of which transfer runs next, and the threads that run it.

Invariant: within a lane (one per extent) requests take effect in submission order: a shared
request (read) starts after the last exclusive one (write) before it is done, an exclusive one
after everything before it. No thread ever waits for another request: a blocked request is simply
not in the queue yet, so any number of requests is safe with any number of threads. Among runnable
parts those of urgent requests go first, then the oldest request's. A request's future is done only
when none of its parts runs any more.

The threads call only what they are handed; nothing that is handed to them calls torch.
"""

import heapq
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from zeepo.errors import InternalError, SessionError

Part = Callable[[int], None]
"""One share of a transfer; called once with the index of the thread that runs it."""


class Transfer(Future[None]):
    """A request's future, which tells how far it is."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.num_parts_done = 0


class Lane:
    """The requests of one extent that are not done, in order; touched under the queue's lock."""

    __slots__ = ("failure", "last_exclusive", "shared_since")

    def __init__(self) -> None:
        self.last_exclusive: _Request | None = None
        self.shared_since: list[_Request] = []
        self.failure: Exception | None = None
        """Why the last exclusive request failed: what it wrote cannot be read."""


class _Request:
    __slots__ = (
        "dependents", "error", "exclusive", "first_failed", "future", "is_urgent", "lane",
        "num_blockers", "num_parts_left", "on_done", "parts", "sequence",
    )  # fmt: skip

    def __init__(
        self,
        sequence: int,
        lane: Lane,
        parts: Sequence[Part],
        exclusive: bool,
        is_urgent: bool,
        on_done: Callable[[], None] | None,
    ) -> None:
        self.sequence = sequence
        self.is_urgent = is_urgent
        self.lane = lane
        self.parts = parts
        self.exclusive = exclusive
        self.on_done = on_done
        self.num_parts_left = len(parts)
        self.num_blockers = 0
        self.dependents: list[_Request] = []
        self.error: Exception | None = None
        self.first_failed = len(parts)
        """The part whose error it is: of several that failed the first, whoever was quicker."""
        self.future = Transfer(len(parts))
        self.future.set_running_or_notify_cancel()  # A transfer cannot be cancelled half way.


class TransferQueue:
    """Daemon threads that run the parts of transfers, oldest request first."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self._owner_pid = os.getpid()
        self._changed = threading.Condition()
        self._ready: list[tuple[bool, int, int, _Request, Part]] = []
        self._blocked: set[_Request] = set()
        self._next_sequence = 0
        self._is_closed = False
        self._num_running = 0
        self._busy_since = 0.0
        self._seconds_busy = 0.0
        """Before the parts that run now."""
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"zeepo-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        lane: Lane,
        parts: Sequence[Part],
        *,
        exclusive: bool,
        is_urgent: bool = False,
        on_done: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Queue a request. `on_done` runs just before the future completes, failed or not."""
        with self._changed:
            self._check_usable()
            request = _Request(self._next_sequence, lane, parts, exclusive, is_urgent, on_done)
            self._next_sequence += 1
            self._block(request)
            finished: list[_Request] = []
            if request.num_blockers == 0:
                self._start(request, finished)
            else:
                self._blocked.add(request)
        self._complete(finished)
        return request.future

    @property
    def seconds_busy(self) -> float:
        """How long parts ran, one or more at a time, until now."""
        with self._changed:
            running = time.perf_counter() - self._busy_since if self._num_running else 0.0
            return self._seconds_busy + running

    def close(self) -> None:
        """Let running parts end, fail everything not started, join the threads. Idempotent."""
        if os.getpid() != self._owner_pid:
            return  # A forked child has none of the threads.
        with self._changed:
            self._is_closed = True
            abandoned = {request for _, _, _, request, _ in self._ready} | self._blocked
            self._ready.clear()
            self._blocked.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for request in sorted(abandoned, key=lambda request: request.sequence):
            request.error = request.error or SessionError(
                f"the {self.name} tier was closed before this transfer was done"
            )
            if not request.future.done():
                self._complete([request])

    def _check_usable(self) -> None:
        if self._is_closed:
            raise SessionError(f"the {self.name} tier is closed")
        if os.getpid() != self._owner_pid:
            raise InternalError(
                f"the {self.name} tier of process {self._owner_pid} was used in its forked child "
                f"{os.getpid()}: threads do not survive a fork"
            )

    def _block(self, request: _Request) -> None:
        """Enter `request` in its lane and hang it on everything it has to wait for."""
        lane = request.lane
        blockers = [] if lane.last_exclusive is None else [lane.last_exclusive]
        if request.exclusive:
            blockers += lane.shared_since
            lane.last_exclusive, lane.shared_since = request, []
        else:
            lane.shared_since.append(request)
        request.num_blockers = len(blockers)
        for blocker in blockers:
            blocker.dependents.append(request)

    def _start(self, request: _Request, finished: list[_Request]) -> None:
        """Make an unblocked request runnable, or finish it if there is nothing to run."""
        self._blocked.discard(request)
        if not request.exclusive and request.lane.failure is not None:
            request.error = request.lane.failure
            request.parts = ()
        if not request.parts:
            self._finish(request, finished)
            return
        for index, part in enumerate(request.parts):
            place = not request.is_urgent, request.sequence, index
            heapq.heappush(self._ready, (*place, request, part))
        self._changed.notify(len(request.parts))
        request.parts = ()

    def _finish(self, request: _Request, finished: list[_Request]) -> None:
        """Take a request whose parts are over out of its lane and start what waited for it."""
        lane = request.lane
        if request.exclusive:
            lane.failure = request.error
            if lane.last_exclusive is request:
                lane.last_exclusive = None
        elif request in lane.shared_since:
            lane.shared_since.remove(request)
        finished.append(request)
        dependents, request.dependents = request.dependents, []
        for dependent in dependents:
            dependent.num_blockers -= 1
            if dependent.num_blockers == 0:
                self._start(dependent, finished)

    @staticmethod
    def _complete(finished: list[_Request]) -> None:
        """Resolve futures, outside the lock: their callbacks may submit again."""
        for request in finished:
            if request.on_done is not None:
                request.on_done()
            if request.error is not None:
                request.future.set_exception(request.error)
            else:
                request.future.set_result(None)

    def _run(self, thread_index: int) -> None:
        while True:
            with self._changed:
                while not self._ready and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                _, _, index, request, part = heapq.heappop(self._ready)
                is_in_vain = request.error is not None
                if not self._num_running:
                    self._busy_since = time.perf_counter()
                self._num_running += 1
            error: Exception | None = None
            if not is_in_vain:
                try:
                    part(thread_index)
                except Exception as caught:
                    error = caught
            finished: list[_Request] = []
            with self._changed:
                if error is not None and index < request.first_failed:
                    request.error, request.first_failed = error, index
                self._num_running -= 1
                if not self._num_running:
                    self._seconds_busy += time.perf_counter() - self._busy_since
                request.num_parts_left -= 1
                request.future.num_parts_done += 1
                if request.num_parts_left == 0:
                    self._finish(request, finished)
            self._complete(finished)
            # An idle thread must not keep the last transfer's memory alive.
            del request, part, error, finished
