"""One directory of the disk tier: its scratch folder, its file, and the room in it.

Invariant: after the constructor either everything is open and the leftovers of dead sessions are
gone, or nothing of ours is left in the directory. Direct I/O is used when the file system takes
it; `is_direct` says so.
"""

import time
from pathlib import Path

from zeepo.errors import DiskError
from zeepo.memory.files import ScratchFile, accepts_direct, disk_error
from zeepo.memory.mapping import Mapping
from zeepo.memory.scratch import ScratchFolder, check_directory, remove_leftovers
from zeepo.memory.space import FileSpace

_PROBE_BYTES = 8 << 20


class DiskDirectory:
    def __init__(self, directory: Path, *, direct: bool | None) -> None:
        """`direct=None` finds out; True insists, False does without."""
        check_directory(directory)
        self.path = directory
        self.removed_leftovers = remove_leftovers(directory)
        self.folder = ScratchFolder(directory)
        self.space = FileSpace()
        try:
            self.is_direct = direct is not False and accepts_direct(self.folder.chunks_path)
            if direct and not self.is_direct:
                raise DiskError(
                    f"the file system of {directory} refuses direct I/O (O_DIRECT). "
                    f"Give a directory on a local disk, or allow buffered I/O."
                )
            self.file = ScratchFile(self.folder.chunks_path, direct=self.is_direct)
        except DiskError:
            self.folder.remove()
            raise

    def measure_bytes_per_second(self) -> float:
        """A short probe: a few MiB written to the start of the file, flushed, and read back."""
        area = Mapping(_PROBE_BYTES)
        area.memory[:] = bytes(_PROBE_BYTES)  # Touch the pages before the clock starts.
        start = time.perf_counter()
        self.file.write(0, [area.memory])
        try:
            self.file.flush()
        except OSError as error:
            raise disk_error(f"flush {self.file.path}", self.file.path, error) from error
        self.file.read(0, [area.memory])
        return 2 * _PROBE_BYTES / max(time.perf_counter() - start, 1e-6)

    def reclaim(self) -> None:
        """Give every free range of the file back to the file system, if it takes it."""
        for start, stop in self.space.backed_ranges():
            if self.file.punch(start, stop):
                self.space.make_hole(start, stop)

    def close(self) -> None:
        self.file.close()
        self.folder.remove()
