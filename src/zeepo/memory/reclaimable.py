"""Whole values that do not fit the budget: private mappings of unlinked files.

Bytes are written to a new file in one of a disk tier's directories and mapped back. The system
reads a page when it is touched and takes it back when memory is short; a page that is written to
becomes ordinary memory of the process. Invariants: no file has a name after it is opened, so
nothing is left behind whatever happens; no file stays open; the disk space is given back when the
last storage over a mapping dies; a file is on disk, and out of the page cache, before it is mapped.

One mapping holds one chunk or one tensor. From here on the system does the reading: a disk that
fails later is not zeepo's to notice.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Iterator

import torch

from zeepo.errors import DiskError
from zeepo.memory.disk_directory import DiskDirectory
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.files import ScratchFile, disk_error
from zeepo.memory.mapping import PAGE_BYTES, Mapping, address_of, round_up
from zeepo.units import enough_bytes, format_bytes

_STAGING_BYTES = 1 << 20
"""For what direct I/O cannot take as it lies; short-lived, and left to the reserve."""
_PART_BYTES = 8 << 20
"""Without direct I/O, this much is in the page cache at most."""

Pieces = Iterable[tuple[int, memoryview]]
"""(offset, bytes): sorted, not overlapping; gaps become zeros."""


class ReclaimableMapping:
    """`nbytes` that storages are made of; they keep the mapping alive, not this object."""

    def __init__(self, area: memoryview) -> None:
        self._area = area

    def storage(self, offset_bytes: int, nbytes: int) -> torch.UntypedStorage:
        """A torch storage over a part of it, without a copy."""
        memory = self._area[offset_bytes : offset_bytes + nbytes]
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class ReclaimableSpace:
    """Makes such mappings in the directories of a disk tier, while that is open. Thread-safe."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._bytes_by_mapping: dict[int, int] = {}
        self._next_key = 0

    @property
    def alive_bytes(self) -> int:
        """What the mappings that are in use take on disk."""
        return sum(list(self._bytes_by_mapping.values()))

    def check_limit(self, label: str, nbytes: int) -> None:
        """Raise `DiskError` unless the disk tier's limit has room for `nbytes` more."""
        limit_bytes = self._disk.limit_bytes
        taken_bytes = self._disk.used_bytes + self.alive_bytes
        if limit_bytes is not None and taken_bytes + nbytes > limit_bytes:
            raise DiskError(
                f"a copy of {label!r} ({format_bytes(nbytes)}) does not fit in ram, and on disk "
                f"{format_bytes(taken_bytes)} are used of the limit of "
                f"{format_bytes(limit_bytes)}. Raise disk_limit (to at least "
                f"{enough_bytes(taken_bytes + nbytes)} for this alone), or give more ram."
            )

    def check_free(self, nbytes: int) -> None:
        """Raise `DiskError` if the directories clearly have no room for `nbytes` more.

        What the disk tier holds is counted as room: it is given back as the values leave it. A
        directory that is gone tells nothing; writing to it will.
        """
        if not all(directory.folder.path.exists() for directory in self._disk.directories):
            return
        free_bytes = sum(_free_bytes(directory) for directory in self._disk.directories)
        missing_bytes = nbytes - self._disk.used_bytes - free_bytes
        if missing_bytes > 0:
            where = ", ".join(str(directory.path) for directory in self._disk.directories)
            raise DiskError(
                f"{format_bytes(nbytes)} do not fit in ram and have to stay on disk, but "
                f"{where} has {format_bytes(free_bytes)} free. Free another "
                f"{format_bytes(missing_bytes)} there and try again."
            )

    def reclaim(self) -> None:
        """Let the file systems have the room that values left in the disk tier's files."""
        self._disk.reclaim()

    def write(self, label: str, nbytes: int, pieces: Pieces) -> ReclaimableMapping:
        """Write `nbytes` made of `pieces` to a file of their own and map them."""
        directory = max(self._disk.directories, key=_free_bytes)
        file = self._new_file(directory)
        try:
            size_bytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
            writer = _Writer(file, size_bytes)
            for offset, memory in pieces:  # may raise errors of its own
                with _named(label, nbytes):
                    writer.pad_to(offset)
                    writer.append(memory)
            with _named(label, nbytes):
                writer.pad_to(size_bytes)
                file.leave_cache()
                area = file.map_privately(size_bytes)
        finally:
            file.close()
        self._follow(area, size_bytes)
        return ReclaimableMapping(memoryview(area).cast("B"))

    def _new_file(self, directory: DiskDirectory) -> ScratchFile:
        path = directory.folder.whole_path
        with self._lock:  # one name for all: nobody else may open it before it is gone
            file = ScratchFile(path, direct=directory.is_direct)
            try:
                path.unlink()
            except OSError as error:
                file.close()
                raise disk_error(f"unlink {path}", path, error) from error
        return file

    def _follow(self, area: object, nbytes: int) -> None:
        """Count a mapping until nobody uses it. Garbage is collected anywhere: no lock there."""
        with self._lock:
            key = self._next_key
            self._next_key += 1
        self._bytes_by_mapping[key] = nbytes
        weakref.finalize(area, self._bytes_by_mapping.pop, key, None).atexit = False


class _Writer:
    """Fills a file from its start to its end, in whole pages."""

    def __init__(self, file: ScratchFile, size_bytes: int) -> None:
        self._file = file
        self._staging = Mapping(min(_STAGING_BYTES, size_bytes))
        self._staged_bytes = 0
        self._written_bytes = 0
        self._cached_bytes = 0

    def pad_to(self, offset: int) -> None:
        """Zeros up to `offset`."""
        missing_bytes = offset - self._written_bytes - self._staged_bytes
        while missing_bytes > 0:
            count = min(missing_bytes, self._staging.nbytes - self._staged_bytes)
            ctypes.memset(self._staging.address + self._staged_bytes, 0, count)
            self._staged(count)
            missing_bytes -= count

    def append(self, memory: memoryview) -> None:
        address = address_of(memory)
        if self._staged_bytes == 0 and address % self._file.alignment_bytes == 0:
            direct_bytes = memory.nbytes // PAGE_BYTES * PAGE_BYTES
            for low in range(0, direct_bytes, _PART_BYTES):
                self._write(memory[low : min(low + _PART_BYTES, direct_bytes)])
            memory = memory[direct_bytes:]
            address += direct_bytes
        left_bytes = memory.nbytes
        while left_bytes:
            count = min(left_bytes, self._staging.nbytes - self._staged_bytes)
            ctypes.memmove(self._staging.address + self._staged_bytes, address, count)
            self._staged(count)
            address += count
            left_bytes -= count

    def _staged(self, count: int) -> None:
        """Write at page boundaries where that can be: at the end the last page is complete."""
        self._staged_bytes += count
        position = self._written_bytes + self._staged_bytes
        if self._staged_bytes == self._staging.nbytes or position % PAGE_BYTES == 0:
            self._write(self._staging.memory[: self._staged_bytes])
            self._staged_bytes = 0

    def _write(self, memory: memoryview) -> None:
        self._file.write(self._written_bytes, [memory])
        self._written_bytes += memory.nbytes
        self._cached_bytes += memory.nbytes
        if self._cached_bytes >= _PART_BYTES:
            self._file.leave_cache()
            self._cached_bytes = 0


@contextlib.contextmanager
def _named(label: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except DiskError as error:
        what = f"{label!r} ({format_bytes(nbytes)})"
        raise DiskError(f"{what} cannot be put on disk: {error}") from error


def _free_bytes(directory: DiskDirectory) -> int:
    try:
        status = os.statvfs(directory.folder.path)
    except OSError as error:
        raise disk_error(f"look at {directory.path}", directory.path, error) from error
    return status.f_bavail * status.f_frsize
