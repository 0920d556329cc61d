"""A file that appears whole or not at all.

It is written under a temporary name beside its target, made durable, and only then renamed.
Invariant: until `publish` nobody sees it under its name and what had that name is untouched; after
`discard` nothing is left. Written pages are sent to the disk and dropped every so often, because
the page cache counts against a memory cgroup.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeepo.memory.files import disk_error

DIRTY_BYTES = 16 << 20
"""How much may wait in the page cache before it is sent to the disk."""


class StagedFile:
    """A new file for `target`, open for writing."""

    def __init__(self, target: Path):
        self.target = target
        self._path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        self._num_dirty_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with _named(f"write {target}", target):
            self._fd = os.open(self._path, flags, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        left = memoryview(data)
        with _named(f"write {self.target}", self._path):
            while left:
                left = left[os.write(self._fd, left) :]
            self._num_dirty_bytes += len(data)
            if self._num_dirty_bytes >= DIRTY_BYTES:
                self._clean_cache()

    def _clean_cache(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._num_dirty_bytes = 0

    def finish(self) -> None:
        """Nothing more is written; what was is on the disk."""
        with _named(f"write {self.target}", self._path):
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close()

    def publish(self) -> None:
        """Give the finished file its name, in place of whatever had it."""
        with _named(f"rename {self._path} to {self.target}", self._path):
            os.replace(self._path, self.target)

    def discard(self) -> None:
        """Leave nothing behind; harmless once published."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def staging() -> Iterator[list[StagedFile]]:
    """Files put into the list are discarded at the end, unless they were published."""
    files: list[StagedFile] = []
    try:
        yield files
    finally:
        for file in files:
            file.discard()


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with _named(f"remove {path}", path):
        path.unlink(missing_ok=True)


def make_names_durable(folder: Path) -> None:
    """After renaming in `folder`: a power failure does not undo it."""
    with _named(f"write {folder}", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _named(action: str, path: Path) -> Iterator[None]:
    """An error of the system says what was done, where, and what to try."""
    try:
        yield
    except OSError as error:
        raise disk_error(action, path, error) from error
