"""What one session tells its listeners: collected here, so that the session only says when.

Events: `session_open` once the model is taken over, `plan` when the first batch has told what a
step needs, `step` after each optimizer step, `budget` when the limit changes, `closing`, `close`.
Everything is read from counters that are kept anyway, and only when somebody listens. Listeners
come from the option `events` and from the observers ([observing]); they listen from before the
session is set up until it is closed, so that an events file that cannot be written is refused
before anything is changed.

Resident memory is measured since zeepo was imported, which is what `ram` bounds. Its peak is the
kernel's own (VmHWM): nothing between two steps is missed, but it is that of the process's whole
life, so `session_open` tells what it was by then.
"""

from __future__ import annotations

import os
import time
from typing import Any

from zeepo import events
from zeepo.chunks.store import ChunkStore
from zeepo.config import Options
from zeepo.engine.observing import Observation
from zeepo.engine.ranks import Ranks
from zeepo.engine.stats import Stats, collect_stats
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.pool import BufferPool
from zeepo.planner.machine import peak_resident_growth_bytes, resident_growth_bytes
from zeepo.planner.plan import Plan

OF_RANKS = ("bytes_sent", "bytes_received", "seconds_waited_for_ranks")
"""What is counted when there are several ranks, by kind and by unit."""


class Telemetry:
    """The events of one session."""

    _source: tuple[ChunkStore, BufferPool, DiskTier | None, None, Ranks | None]

    def __init__(self, options: Options) -> None:
        self._num_steps = 0
        files = [] if options.events is None else [events.EventFile(options.events)]
        self._observation = Observation(options, files)

    def stop(self) -> None:
        """Nobody listens any more; twice is harmless."""
        self._observation.stop()

    def opened(
        self,
        plan: Plan,
        store: ChunkStore,
        pool: BufferPool,
        disk: DiskTier | None,
        ranks: Ranks | None,
    ) -> None:
        """The session is set up."""
        self._source = (store, pool, disk, None, ranks)
        self._plan = plan
        self._opened_at = self._stepped_at = time.monotonic()
        self._before = collect_stats(*self._source)
        self._disk_room = None if disk is None else _room(disk)
        self._peak_growth_at_open = self._peak_growth = peak_resident_growth_bytes()
        if not events.is_heard():
            return
        directories = [] if disk is None else [directory.path for directory in disk.directories]
        events.emit(
            "session_open",
            ram=plan.ram,
            minimum_ram=plan.minimum_ram,
            managed_bytes=plan.managed_bytes,
            units={unit.name: unit.param_bytes for unit in plan.units},
            placement=dict(plan.placement),
            disk=[str(path) for path in directories],
            bytes_limit=self._limits(),
            **self._whose(),
            **self._resident(),
        )

    def stepped(self) -> None:
        """One optimizer step is over; what is counted is counted since the one before."""
        self._num_steps += 1
        if not events.is_heard():
            return
        now, stats, before = time.monotonic(), collect_stats(*self._source), self._before
        events.emit(
            "step",
            number=self._num_steps,
            seconds=now - self._stepped_at,
            bytes_now=stats.bytes_now,
            bytes_peak=stats.bytes_peak,
            bytes_limit=self._limits(),
            bytes_by_tag=stats.bytes_by_tag,
            **_between(before, stats),
            **self._whose(),
            **self._resident(),
        )
        self._stepped_at, self._before = now, stats

    def planned(self, plan: Plan) -> None:
        """The first batch was seen, and what a step needs is known better."""
        self._plan = plan
        if events.is_heard():
            found = plan.footprint
            events.emit(
                "plan",
                ram=plan.ram,
                minimum_ram=plan.minimum_ram,
                saved_activation_bytes=None if found is None else found.saved_bytes,
                unknown_because=plan.unknown_because,
            )

    def resized(self, plan: Plan, why: str) -> None:
        """`ram` is another from now on."""
        old, self._plan = self._plan.ram, plan
        events.emit("budget", old=old, new=plan.ram, why=why)

    def closing(self) -> None:
        """The training is over: what giving everything back takes is not part of its peak."""
        events.emit("closing")
        self._peak_growth = peak_resident_growth_bytes()
        self._bytes_peak = collect_stats(*self._source).bytes_peak

    def closed(self) -> None:
        """Everything is given back: the totals, and how the prediction compares."""
        if events.is_heard():
            stats = collect_stats(*self._source)
            events.emit(
                "close",
                num_steps=self._num_steps,
                seconds=time.monotonic() - self._opened_at,
                ram=self._plan.ram,
                minimum_ram=self._plan.minimum_ram,
                peak_resident_growth_bytes=self._peak_growth,
                peak_resident_growth_at_open_bytes=self._peak_growth_at_open,
                bytes_peak=self._bytes_peak,
                bytes_moved=stats.bytes_moved,
                evictions=stats.evictions,
                buffer_reuses=stats.buffer_reuses,
                seconds_waited=stats.seconds_waited,
                **{name: stats[name] for name in OF_RANKS if stats[name]},
                **self._whose(),
            )
        self.stop()

    def _limits(self) -> dict[str, int | None]:
        pool = self._source[1]
        return {"ram": pool.ledger.limit_bytes, "disk": self._disk_room}

    def _whose(self) -> dict[str, int]:
        """Several ranks may write into one file."""
        ranks = self._source[-1]
        return {} if ranks is None else {"rank": ranks.rank}

    def _resident(self) -> dict[str, int]:
        return {
            "resident_growth_bytes": resident_growth_bytes(),
            "peak_resident_growth_bytes": peak_resident_growth_bytes(),
        }


def _room(disk: DiskTier) -> int:
    """The most that the disk tier can hold: its limit, or what is free when the session opens."""
    if disk.limit_bytes is not None:
        return disk.limit_bytes
    free = {}  # two directories on one file system have its room once
    for directory in disk.directories:
        status = os.statvfs(directory.path)
        free[os.stat(directory.path).st_dev] = status.f_bavail * status.f_frsize
    return disk.used_bytes + sum(free.values())


def _between(before: Stats, after: Stats) -> dict[str, Any]:
    moved = after.bytes_moved.items()
    return {
        "bytes_moved": {edge: total - before.bytes_moved[edge] for edge, total in moved},
        "evictions": after.evictions - before.evictions,
        "buffer_reuses": after.buffer_reuses - before.buffer_reuses,
        "seconds_waited": after.seconds_waited - before.seconds_waited,
        **{
            name: {key: total - before[name].get(key, 0) for key, total in after[name].items()}
            for name in OF_RANKS
            if after[name]
        },
    }
