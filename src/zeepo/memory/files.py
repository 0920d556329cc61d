"""One scratch file: whole reads and writes of scattered memory, direct where possible.

Invariant: `read` and `write` transfer everything they are asked or raise, with the directory, the
amount and what to try. With `alignment_bytes` > 1 the file is open for direct I/O and offsets,
addresses and lengths must be multiples of it; the callers bounce what is not.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from zeepo.errors import CorruptionError, DiskError
from zeepo.memory.mapping import PAGE_BYTES, Mapping, map_file
from zeepo.units import format_bytes

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_ADVICE = {
    errno.ENOSPC: "Free some space, give another directory, or set disk_limit lower.",
    errno.EDQUOT: "The quota on this file system is used up: free some, or give another one.",
    errno.EACCES: "Make the directory writable for this user, or give another one.",
    errno.EPERM: "Make the directory writable for this user, or give another one.",
    errno.EROFS: "The file system is read-only: give a directory on another one.",
    errno.ENOENT: "Create the directory first, or correct its path.",
    errno.ENOTDIR: "Give a directory, not a file.",
    errno.EIO: "The device reported an error: look at the kernel log (dmesg), use another disk.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENOMEM: "The system allows no more mappings: raise vm.max_map_count.",
    errno.EFBIG: "The file size limit is too low (ulimit -f) for this file system.",
}


def disk_error(action: str, path: Path, error: OSError) -> DiskError:
    """`error` as a `DiskError` that says what was done, where, and what to try."""
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error)
    advice = _ADVICE.get(number, "Check the disk, or give another directory.")
    free = "" if number not in (errno.ENOSPC, errno.EDQUOT) else f" ({_free_text(path)})"
    return DiskError(f"cannot {action}: {reason}{free}. {advice}")


def _free_text(path: Path) -> str:
    try:
        status = os.statvfs(path)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    return f"{format_bytes(status.f_bavail * status.f_frsize)} free in {path.parent}"


class ScratchFile:
    """A new file at `path`, open for reading and writing until `close`."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self.alignment_bytes = PAGE_BYTES if direct else 1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        except OSError as error:
            raise disk_error(f"open {path}", path, error) from error

    def read(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets`, in order, from `offset`; a file that ends early is corrupt."""
        left = list(targets)
        wanted_bytes = sum(target.nbytes for target in left)
        position = offset
        while left:
            try:
                count = os.preadv(self.fd, left, position)
            except OSError as error:
                raise self.read_error(error.errno or 0, offset, wanted_bytes) from error
            if count == 0:
                raise self.end_error(offset, wanted_bytes)
            position += count
            left = _after(left, count)

    def write(self, offset: int, sources: Sequence[memoryview]) -> None:
        """Write all of `sources`, in order, at `offset`."""
        left = list(sources)
        wanted_bytes = sum(source.nbytes for source in left)
        position = offset
        while left:
            try:
                count = os.pwritev(self.fd, left, position)
                if count == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise self.write_error(error.errno or 0, offset, wanted_bytes) from error
            position += count
            left = _after(left, count)

    def read_error(self, number: int, offset: int, nbytes: int) -> DiskError:
        """What to say when the system answered a read with errno `number`."""
        return self._transfer_error("read", number, offset, nbytes)

    def write_error(self, number: int, offset: int, nbytes: int) -> DiskError:
        return self._transfer_error("write", number, offset, nbytes)

    def _transfer_error(self, verb: str, number: int, offset: int, nbytes: int) -> DiskError:
        what = f"{verb} {format_bytes(nbytes)} at offset {offset} of {self.path}"
        return disk_error(what, self.path, OSError(number, os.strerror(number)))

    def end_error(self, offset: int, nbytes: int) -> CorruptionError:
        """What to say when the file ended before what was read."""
        return CorruptionError(
            f"{self.path} ends at {os.fstat(self.fd).st_size} bytes, but {format_bytes(nbytes)} "
            f"were written at offset {offset}: the file was truncated. Something else changed "
            f"zeepo's scratch file; resume from the last checkpoint."
        )

    def punch(self, start: int, stop: int) -> bool:
        """Give [start, stop) back to the file system; False if it cannot do that."""
        length = ctypes.c_int64(stop - start)
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        return bool(_LIBC.fallocate64(self.fd, mode, ctypes.c_int64(start), length) == 0)

    def flush(self) -> None:
        os.fdatasync(self.fd)

    def leave_cache(self) -> None:
        """Have everything written on disk and out of the page cache, which counts as memory."""
        if self.alignment_bytes > 1:
            return
        try:
            self.flush()
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise disk_error(f"flush {self.path}", self.path, error) from error

    def map_privately(self, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
        """The first `nbytes` as writable memory; what is written there never reaches the file."""
        try:
            return map_file(self.fd, nbytes)
        except OSError as error:
            raise disk_error(f"map {self.path}", self.path, error) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_LIBC = ctypes.CDLL(None, use_errno=True)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def accepts_direct(path: Path) -> bool:
    """Whether the file system takes direct I/O: tried by writing one page at `path` and reading it.

    tmpfs and some network file systems refuse, at open or only at the first transfer.
    """
    page = Mapping(PAGE_BYTES)
    page.memory[:4] = b"zeep"
    back = Mapping(PAGE_BYTES)
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT, 0o600
        )
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise disk_error(f"open {path}", path, error) from error
    try:
        os.pwritev(fd, [page.memory], 0)
        os.preadv(fd, [back.memory], 0)
        return bool(back.memory == page.memory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise disk_error(f"write to {path}", path, error) from error
    finally:
        os.close(fd)
