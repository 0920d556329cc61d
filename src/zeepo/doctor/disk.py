"""A directory as a disk for zeepo: what file system it is, and how fast it is through zeepo.

Invariant: what is measured is zeepo's own disk tier, with direct I/O and checksums as in training,
and nothing of it is left in the directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from zeepo.doctor.finding import Finding, State
from zeepo.errors import DiskError
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.mapping import Mapping
from zeepo.memory.scratch import check_directory
from zeepo.units import MiB, format_bytes

SECTION = "Disk"
MEASURED_BYTES = 256 * MiB
SLOW_BYTES_PER_SECOND = 1e9
READ_BYTES_PER_PARAMETER, WRITTEN_BYTES_PER_PARAMETER = 17, 15
"""Of one step of AdamW in fp32 with everything on disk, measured."""

_EXTENT_BYTES = 32 * MiB
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs")


def disk_findings(directory: Path) -> Iterator[Finding]:
    """What kind of disk, how much is free, and how fast."""
    try:
        check_directory(directory)
        yield _file_system(directory)
        free = _free_bytes(directory)
        yield Finding(SECTION, "free", format_bytes(free), free)
        if free < 2 * MEASURED_BYTES:
            advice = f"Speed is not measured below {format_bytes(2 * MEASURED_BYTES)} free."
            yield Finding(SECTION, "speed", "not measured", None, State.WARNING, advice)
        else:
            yield from _speed(directory)
    except DiskError as error:
        advice = "Give --disk a directory on a local disk."
        yield Finding(SECTION, str(directory), str(error), None, State.FAILED, advice)


def _file_system(directory: Path) -> Finding:
    kind = file_system_type(directory)
    text = f"{directory} ({kind})"
    if kind in _IN_MEMORY:
        advice = "This is memory, not a disk: what rests here counts against ram. Give another."
        return Finding(SECTION, "directory", text, kind, State.WARNING, advice)
    if kind in _REMOTE:
        advice = "A file system of another machine: a local disk is faster and steadier."
        return Finding(SECTION, "directory", text, kind, State.SLOW, advice)
    return Finding(SECTION, "directory", text, kind)


def file_system_type(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """What the directory's file system is called; "unknown" where that cannot be read."""
    found, depth = "unknown", -1
    resolved = directory.resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))  # \040 is a space
        # A later mount on the same point hides an earlier one.
        if resolved.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = rest.split()[0], len(point.parts)
    return found


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _speed(directory: Path) -> Iterator[Finding]:
    tier = DiskTier([directory])
    try:
        is_direct = tier.directories[0].is_direct
        read, write = _measure(tier)
    finally:
        tier.close()
    if is_direct:
        yield Finding(SECTION, "direct I/O", "works", True)
    else:
        advice = "Transfers go through the page cache, which counts as memory. A local disk can."
        yield Finding(SECTION, "direct I/O", "refused", False, State.WARNING, advice)
    yield _speed_finding("reading", read)
    yield _speed_finding("writing", write)
    seconds = 1e9 * (READ_BYTES_PER_PARAMETER / read + WRITTEN_BYTES_PER_PARAMETER / write)
    text = (
        f"about {seconds:.0f} s a step for each billion parameters (AdamW in fp32, everything on "
        "disk), hidden behind compute where there is enough of it"
    )
    yield Finding(SECTION, "transfers", text, seconds)


def _speed_finding(name: str, bytes_per_second: float) -> Finding:
    text = f"{bytes_per_second / 1e9:.2f} GB/s"
    if bytes_per_second >= SLOW_BYTES_PER_SECOND:
        return Finding(SECTION, name, text, bytes_per_second)
    advice = "A faster disk, directories on several disks (disk=[...]), or more ram would help."
    return Finding(SECTION, name, text, bytes_per_second, State.SLOW, advice)


def _measure(tier: DiskTier) -> tuple[float, float]:
    """Bytes per second read and written."""
    area = Mapping(MEASURED_BYTES)
    area.memory[:] = np.random.default_rng(0).bytes(MEASURED_BYTES)
    parts = [
        (tier.allocate("doctor", _EXTENT_BYTES), area.memory[start : start + _EXTENT_BYTES])
        for start in range(0, MEASURED_BYTES, _EXTENT_BYTES)
    ]
    _wait([tier.write(extent, [(0, memory)]) for extent, memory in parts])
    # Written again, as in training: the first time the file system also looks for room.
    start = time.perf_counter()
    _wait([tier.write(extent, [(0, memory)]) for extent, memory in parts])
    between = time.perf_counter()
    _wait([tier.read(extent, memory) for extent, memory in parts])
    end = time.perf_counter()
    return MEASURED_BYTES / (end - between), MEASURED_BYTES / (between - start)


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()
