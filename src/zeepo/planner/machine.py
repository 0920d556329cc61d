"""What this machine, or the cgroup we are in, has to give. Reads /proc and /sys only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from zeepo.config import launched_ranks

MARGIN = 0.1
"""Share of the free memory that is left alone when the user states no budget."""


def _read_text(path: str) -> str:
    """A small file of the system's, whole. These are read ten times a second during training, and
    half of the time went into what `open` and `Path` do around it."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(file, 1 << 14):
            parts.append(part)
    finally:
        os.close(file)
    return b"".join(parts).decode()


def _read_int(path: str) -> int | None:
    try:
        text = _read_text(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def machine_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """MemAvailable, or None where there is no such file."""
    try:
        text = _read_text(str(meminfo))
    except OSError:
        return None
    _, found, rest = text.partition("MemAvailable:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if found else None


class CgroupLimit(NamedTuple):
    """A limit on the memory of a cgroup that we are in, and what it uses."""

    version: int
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int
    """Of that: cached files, which the system drops when it needs the memory."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes + self.reclaimable_bytes)


def cgroup_limits(
    cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[CgroupLimit]:
    """The limits of our memory cgroup (version 1 or 2) and of those it is in."""
    try:
        lines = _read_text(str(cgroup)).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, limit, usage = f"{root}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers == "":
            top, limit, usage = str(root), "memory.max", "memory.current"
        else:
            continue
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):  # a limit on a parent holds for us too
            folder = "/".join([top, *names[:depth]])
            most = _read_int(f"{folder}/{limit}")
            if most is None or most >= 1 << 60:
                continue
            used = _read_int(f"{folder}/{usage}")
            if used is not None:
                cached = _cached_bytes(f"{folder}/memory.stat")
                found.append(CgroupLimit(1 if controllers else 2, most, used, min(cached, used)))
    return found


def _cached_bytes(stat: str) -> int:
    """Cached files that are not in use, of a cgroup and those in it."""
    try:
        values = dict(line.split(maxsplit=1) for line in _read_text(stat).splitlines())
    except (OSError, ValueError):
        return 0
    inactive = values.get("total_inactive_file", values.get("inactive_file", "0"))
    return int(inactive) if inactive.isdigit() else 0


def cgroup_available_bytes(
    cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What our memory cgroup still allows, or None without a limit."""
    limits = cgroup_limits(cgroup, root)
    return min((one.free_bytes for one in limits), default=None)


_PREAD = ctypes.PyDLL(None).pread
"""Keeps the interpreter's lock, as `os.pread` does not: for so short a call it would have to be won
back from the threads that read and write."""
_PREAD.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_PREAD.restype = ctypes.c_ssize_t


class _OwnFile:
    """A file that tells of this process, kept open: it is read wherever the engine needs room."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path = path
        self._pid = 0
        self._file = -1
        self._text = ctypes.create_string_buffer(most_bytes)

    def read(self) -> bytes:
        """What it says now; nothing where there is no such file."""
        if self._pid != os.getpid():  # of a fork the file would still tell its parent's
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""
            self._pid = os.getpid()
        nbytes = _PREAD(self._file, self._text, len(self._text), 0)
        if nbytes <= 0:
            raise OSError(f"{self._path}, which tells of this process, cannot be read")
        return self._text.raw[:nbytes]


def own_cgroup_limit(
    cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Callable[[], bytes]:
    """Reads what the limit of our memory cgroup is said to be, in microseconds; nothing where there
    is none."""
    try:
        lines = _read_text(str(cgroup)).splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        found = Path()
        if "memory" in controllers.split(","):
            found = root / "memory" / path.lstrip("/") / "memory.limit_in_bytes"
        elif controllers == "":
            found = root / path.lstrip("/") / "memory.max"
        if found.is_file():
            return partial(_read_if_there, _limit_file(str(found)))
    return lambda: b""


def _read_if_there(file: _OwnFile) -> bytes:
    """Nothing where the process was moved elsewhere and its first cgroup removed."""
    try:
        return file.read()
    except OSError:
        return b""


@cache
def _limit_file(path: str) -> _OwnFile:
    """Open once, however many sessions there are."""
    return _OwnFile(path, 64)


_STATM = _OwnFile("/proc/self/statm", 128)
_STATUS = _OwnFile("/proc/self/status", 1 << 13)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """This process's resident memory, or 0 where it cannot be read."""
    text = _STATM.read()
    return int(text.split(maxsplit=2)[1]) * _PAGE_BYTES if text else 0


_RESIDENT_AT_IMPORT = resident_bytes()


def resident_growth_bytes() -> int:
    """How much the process has grown since zeepo was imported."""
    return resident_bytes() - _RESIDENT_AT_IMPORT


def peak_resident_growth_bytes() -> int:
    """The most the process ever had beyond what it had when zeepo was imported.

    The kernel's own high-water mark, of the process's whole life: memory that was given back
    before the import counts too. 0 where it cannot be read.
    """
    _, found, rest = _STATUS.read().partition(b"VmHWM:")
    return max(0, int(rest.split(maxsplit=1)[0]) * 1024 - _RESIDENT_AT_IMPORT) if found else 0


def spare_bytes() -> int | None:
    """What the machine and our cgroup can still give; None where that cannot be told."""
    found = [n for n in (machine_available_bytes(), cgroup_available_bytes()) if n is not None]
    return min(found, default=None)


def available_ram_bytes() -> int:
    """What a session may take when the user states no budget: of the host, this rank's share."""
    spare = spare_bytes()
    ranks = launched_ranks(os.environ, "LOCAL_WORLD_SIZE")
    return (4 << 30 if spare is None else int(spare * (1 - MARGIN))) // ranks
