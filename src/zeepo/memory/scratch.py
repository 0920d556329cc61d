"""The folder a session keeps on a disk, and what earlier sessions left behind.

`zeepo-scratch-<pid>-<random>/` holds `lock` (flocked for the session's life), `owner.json` (pid,
start time, host) and `chunks.bin`; `whole.bin` is there for a moment, until it is unlinked.
Invariant: a folder is removed only by the process that made it, or by one that holds its lock,
which nobody can while the maker (or a child it forked) lives.
A folder with any other name, without our owner file, or with a file we do not know, is left
alone; symbolic links are never followed.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
import weakref
from pathlib import Path

from zeepo.errors import DiskError
from zeepo.memory.files import disk_error

_NAME = re.compile(r"zeepo-scratch-[0-9]+-[0-9a-f]{16}")
_LOCK = "lock"
_OWNER = "owner.json"
_CHUNKS = "chunks.bin"
_WHOLE = "whole.bin"
_RETRY_SECONDS = 0.02
# The lock goes last: until then a second cleaner finds it held.
_KNOWN_FILES = (_WHOLE, _CHUNKS, _OWNER, _LOCK)


_made: weakref.WeakSet["ScratchFolder"] = weakref.WeakSet()
_used_directories: set[Path] = set()


def remove_before_hard_end() -> None:
    """For a process that ends without its finalizers: its own folders go, and those that its
    ranks, killed before they could, have left beside them."""
    for folder in _made:
        folder.remove()
    for directory in _used_directories:
        with contextlib.suppress(DiskError):  # the directory itself is gone
            remove_leftovers(directory)


class ScratchFolder:
    """This session's folder in `directory`, until `remove`."""

    def __init__(self, directory: Path) -> None:
        self._owner_pid = os.getpid()
        self.path = directory / f"zeepo-scratch-{self._owner_pid}-{secrets.token_hex(8)}"
        self.chunks_path = self.path / _CHUNKS
        self.whole_path = self.path / _WHOLE
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise disk_error(f"make a scratch folder in {directory}", self.path, error) from error
        self._lock_fd = -1
        try:
            self._lock_fd = os.open(
                self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            # The lock comes before the owner file: without an owner file nobody cleans the folder.
            # Who looks whether to clean it holds the lock for a moment, hence no LOCK_NB.
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            owner = {
                "pid": self._owner_pid,
                "start_time": time.time(),
                "host": socket.gethostname(),
            }
            (self.path / _OWNER).write_text(json.dumps(owner))
        except OSError as error:
            failure = disk_error(f"write to {self.path}", self.path, error)
            self.remove()
            raise failure from error
        _made.add(self)
        _used_directories.add(directory.resolve())

    def remove(self) -> None:
        """Delete the folder. Does nothing a second time, or in a forked child."""
        if self._lock_fd < 0 or os.getpid() != self._owner_pid:
            return
        for name in _KNOWN_FILES:
            (self.path / name).unlink(missing_ok=True)
        # Gone already, or someone put a file of their own there: theirs to keep.
        with contextlib.suppress(OSError):
            self.path.rmdir()
        os.close(self._lock_fd)
        self._lock_fd = -1


def check_directory(directory: Path) -> None:
    """Raise `DiskError` unless `directory` is one we can make files in."""
    try:
        is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
    except FileNotFoundError:
        raise DiskError(
            f"disk directory {directory} does not exist. "
            f"Create it first (mkdir -p {directory}), or correct the path."
        ) from None
    except OSError as error:
        raise disk_error(f"use {directory}", directory, error) from error
    if not is_directory:
        raise DiskError(f"disk {directory} is not a directory. Give a directory to put files in.")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DiskError(
            f"disk directory {directory} is not writable for user {os.geteuid()}. "
            f"Change its permissions, or give another directory."
        )


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what dead sessions left in `directory`; the folders removed."""
    removed = []
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise disk_error(f"list {directory}", directory, error) from error
    for name in names:
        if _NAME.fullmatch(name):
            try:
                if _remove_if_dead(directory / name):
                    removed.append(directory / name)
            except OSError:
                continue  # Another process removed it first, or it is not ours to touch.
    return removed


def remove_of_dead(folder: Path, seconds: float) -> bool:
    """Remove one scratch folder whose owner is dying; False if it lives on, or is not ours."""
    deadline = time.monotonic() + seconds
    while _NAME.fullmatch(folder.name):
        try:
            return _remove_if_dead(folder)
        except BlockingIOError:  # the lock is held: by its owner, or by another who removes it
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return False  # removed already, or not ours to touch
    return False


def _remove_if_dead(folder: Path) -> bool:
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_ours(folder_fd):
                return False
            for name in _KNOWN_FILES:
                try:
                    os.unlink(name, dir_fd=folder_fd)
                except FileNotFoundError:
                    continue
            os.rmdir(folder)
            return True
        finally:
            os.close(lock_fd)
    finally:
        os.close(folder_fd)


def _is_ours(folder_fd: int) -> bool:
    """Whether a folder holds our owner file, and only plain files that we make."""
    names = set(os.listdir(folder_fd))
    if _OWNER not in names or not names <= set(_KNOWN_FILES):
        return False
    for name in names:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return False
    owner_fd = os.open(_OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    with os.fdopen(owner_fd, encoding="utf-8") as file:
        try:
            owner = json.load(file)
        except ValueError:
            return False
    return isinstance(owner, dict) and {"pid", "start_time", "host"} <= owner.keys()
