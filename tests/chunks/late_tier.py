"""A tier that moves nothing until it must: whoever forgets to wait sees old bytes, every time.

Requests lie in a queue. Waiting for a future runs its extent's requests up to it and no others;
`deliver` runs some of the others, out of order, as a background thread would. `fail_next` makes
requests fail as a disk does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from zeepo.errors import DiskError
from zeepo.memory.tier import Describe, Extent, Tier


class Boom(DiskError):
    """What a failing request fails with."""


class LateExtent(Extent):
    """An extent, and the one of the tier beneath that holds its bytes."""

    def __init__(self, inner: Extent) -> None:
        super().__init__(inner.label, inner.nbytes, inner.describe)
        self.inner = inner


class LateFuture(Future[None]):
    """Done only when somebody waits for it or the tier delivers."""

    def __init__(self, tier: LateTier, extent: LateExtent, run: Callable[[], None], what: str):
        super().__init__()
        self.tier, self.extent, self.run, self.what = tier, extent, run, what

    def result(self, timeout: float | None = None) -> None:
        self.tier.run_until(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.tier.run_until(self)
        return super().exception(0)


class LateTier:
    """`Tier` over another one."""

    name = "late"

    def __init__(self, inner: Tier, seed: int = 0) -> None:
        self.inner = inner
        self.pending: list[LateFuture] = []
        self.num_failures_due = 0
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allocate(self, label: str, nbytes: int, describe: Describe | None = None) -> Extent:
        return LateExtent(self.inner.allocate(label, nbytes, describe))

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        assert isinstance(extent, LateExtent)
        kept = list(pieces)
        extent.num_writes += 1
        inner = extent.inner
        return self._submit(extent, lambda: self.inner.write(inner, kept).result(), "write")

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        assert isinstance(extent, LateExtent)
        inner = extent.inner
        return self._submit(extent, lambda: self.inner.read(inner, target).result(), "read")

    def fail_next(self) -> None:
        """Let the next request that runs fail."""
        self.num_failures_due += 1

    def deliver(self, count: int) -> None:
        """Run up to `count` requests, in any order that the promises of a tier allow."""
        for _ in range(min(count, len(self.pending))):
            first = {id(future.extent): future for future in reversed(self.pending)}
            self._run(self._random.choice(list(first.values())))

    def run_until(self, wanted: LateFuture) -> None:
        for future in [f for f in self.pending if f.extent is wanted.extent]:
            if wanted.done():
                return
            self._run(future)

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, LateExtent)
        for future in [f for f in self.pending if f.extent is extent]:
            self._run(future)
        self.inner.free(extent.inner)

    def close(self) -> None:
        self.inner.close()

    def _submit(self, extent: LateExtent, run: Callable[[], None], what: str) -> LateFuture:
        future = LateFuture(self, extent, run, what)
        self.pending.append(future)
        return future

    def _run(self, future: LateFuture) -> None:
        self.pending.remove(future)
        try:
            if self.num_failures_due:
                self.num_failures_due -= 1
                raise Boom(f"{future.what} of {future.extent.label} failed")
            future.run()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)
