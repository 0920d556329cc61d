"""What can go wrong with a disk, and what the error says."""

import errno
import fcntl
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zeepo.errors import BudgetError, CorruptionError, DiskError
from zeepo.memory import native_blocks
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.memory.ram_tier import RamTier
from zeepo.units import MiB

BLOCK = 64 << 10


@pytest.fixture(params=[None, False], ids=["auto", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier([tmp_path], block_bytes=BLOCK, direct=request.param)
    yield tier
    tier.close()


def chunks_file(tier: DiskTier) -> Path:
    return tier.directories[0].file.path


def fail_with(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# --- bytes that come back wrong ---------------------------------------------------------------


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 100])
def test_a_flipped_bit_is_found_and_named(tier: DiskTier, position: int) -> None:
    nbytes = 2 * BLOCK + 101
    tier.allocate("before", BLOCK)
    extent = tier.allocate("PARAM chunk 3", nbytes, lambda low, high: f"h.0 [{low}, {high})")
    tier.write(extent, [(0, memoryview(bytes(nbytes)))]).result()
    with open(chunks_file(tier), "r+b") as file:
        file.seek(BLOCK + position)
        file.write(b"\x01")
    with pytest.raises(CorruptionError) as raised:
        tier.read(extent, memoryview(bytearray(nbytes))).result()
    message = str(raised.value)
    low = position // BLOCK * BLOCK
    assert f"'PARAM chunk 3' (h.0 [{low}, {min(low + BLOCK, nbytes)}))" in message
    assert f"at offset {BLOCK + low} of {chunks_file(tier)}" in message
    assert "resume from the last checkpoint" in message
    # A new write repairs it.
    tier.write(extent, [(0, memoryview(bytes(nbytes)))])
    tier.read(extent, memoryview(bytearray(nbytes))).result()


def test_an_old_block_in_a_new_place_is_found(tier: DiskTier) -> None:
    extents = [tier.allocate(f"chunk {i}", BLOCK) for i in range(2)]
    for i, extent in enumerate(extents):
        tier.write(extent, [(0, memoryview(bytes([i]) * BLOCK))]).result()
    with open(chunks_file(tier), "r+b") as file:
        content = file.read(BLOCK)
        file.write(content)
    tier.read(extents[0], memoryview(bytearray(BLOCK))).result()
    with pytest.raises(CorruptionError, match="'chunk 1'"):
        tier.read(extents[1], memoryview(bytearray(BLOCK))).result()


def test_tiny_blocks_that_move_one_by_one(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], block_bytes=4096)
    pool = BufferPool(Ledger("ram", None))
    source, target = (pool.acquire(5 * MiB + 1, "test") for _ in range(2))
    source.memory[:] = os.urandom(source.capacity_bytes)
    nbytes = 5 * MiB + 1
    extent = tier.allocate("chunk", nbytes)
    tier.write(extent, [(0, source.memory[:nbytes])]).result()
    tier.read(extent, target.memory[:nbytes]).result()
    assert target.memory[:nbytes] == source.memory[:nbytes]
    tier.close()


def test_a_truncated_file_is_found(tier: DiskTier) -> None:
    extent = tier.allocate("chunk", 4 * BLOCK)
    tier.write(extent, [(0, memoryview(bytes(4 * BLOCK)))]).result()
    os.truncate(chunks_file(tier), 2 * BLOCK)
    with pytest.raises(CorruptionError, match=f"ends at {2 * BLOCK} bytes.*truncated"):
        tier.read(extent, memoryview(bytearray(4 * BLOCK))).result()


@pytest.mark.usefixtures("python_blocks")
def test_short_transfers_are_continued(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may transfer less than asked at any time."""
    whole_write, whole_read = os.pwritev, os.preadv

    def cut(views: list[memoryview]) -> list[memoryview]:
        return [views[0][:4096]] if views[0].nbytes > 4096 else views[:1]

    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: whole_write(fd, cut(v), at))
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: whole_read(fd, cut(v), at))
    content = os.urandom(3 * BLOCK + 17)
    extent = tier.allocate("chunk", len(content))
    target = bytearray(len(content))
    tier.write(extent, [(0, memoryview(content))])
    tier.read(extent, memoryview(target)).result()
    assert target == content


# --- transfers that fail ----------------------------------------------------------------------


@contextmanager
def replaced_file(tier: DiskTier, path: str, flags: int) -> Iterator[None]:
    """The system answers for another file where the tier has its own."""
    fd = tier.directories[0].file.fd
    own, other = os.dup(fd), os.open(path, flags)
    os.dup2(other, fd)
    try:
        yield
    finally:
        os.dup2(own, fd)
        os.close(own)
        os.close(other)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("nbytes", [BLOCK, 3 * BLOCK + 17])
def test_what_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_native: bool, nbytes: int
) -> None:
    """Real errors of real calls: the device that is always full, memory nobody may read."""
    if not is_native:
        monkeypatch.setattr(native_blocks, "library", None)
    tier = DiskTier([tmp_path], block_bytes=BLOCK, direct=False)
    first = tier.allocate("first", BLOCK)
    extent = tier.allocate("chunk", nbytes)
    content = memoryview(os.urandom(nbytes))
    tier.write(first, [(0, content[:BLOCK])]).result()
    tier.write(extent, [(0, content)]).result()
    target = bytearray(nbytes)
    with replaced_file(tier, "/proc/self/mem", os.O_RDONLY):
        with pytest.raises(DiskError, match=r"cannot read 64\.0 KiB at offset 0 of .*dmesg"):
            tier.read(first, memoryview(bytearray(BLOCK))).result()
        with pytest.raises(DiskError, match=r"cannot write 64\.0 KiB at offset 0 of .*Bad file"):
            tier.write(first, [(0, content[:BLOCK])]).result()
    tier.read(extent, memoryview(target)).result()
    assert target == content
    with (
        replaced_file(tier, "/dev/full", os.O_RDWR),
        pytest.raises(DiskError, match=rf"at offset {BLOCK} of .*No space left .* free in"),
    ):
        tier.write(extent, [(0, content)]).result()
    tier.write(extent, [(0, content)]).result()
    tier.read(extent, memoryview(target)).result()
    assert target == content
    tier.close()


def test_a_write_that_the_system_cuts_short(tmp_path: Path) -> None:
    """A file size limit in the middle of a block: part of it is written, then no more."""
    tier = DiskTier([tmp_path], block_bytes=BLOCK, direct=False)
    extent = tier.allocate("chunk", 2 * BLOCK)
    content = memoryview(os.urandom(2 * BLOCK))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 4096, hard))
    try:
        with pytest.raises(DiskError, match=rf"64\.0 KiB at offset {BLOCK} of .*file size limit"):
            tier.write(extent, [(0, content)]).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tier.write(extent, [(0, content)]).result()
    target = bytearray(2 * BLOCK)
    tier.read(extent, memoryview(target)).result()
    assert target == content
    tier.close()


@pytest.mark.usefixtures("python_blocks")
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, r"No space left on device \(.* free in .*\)\. Free some space"),
        (errno.EIO, r"Input/output error\. The device"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
        (errno.EBADF, "Check the disk"),
    ],
)
def test_a_failed_write_fails_its_future_and_later_reads(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    extent = tier.allocate("chunk", 3 * BLOCK)
    content = memoryview(bytes(3 * BLOCK))
    tier.write(extent, [(0, content)]).result()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(number))
        failed = tier.write(extent, [(0, content)])
        reading = tier.read(extent, memoryview(bytearray(3 * BLOCK)))
        with pytest.raises(DiskError, match=text) as raised:
            failed.result()
        attempt = rf"cannot write 64\.0 KiB at offset 0 of {re.escape(str(chunks_file(tier)))}"
        assert re.search(attempt, str(raised.value))
        with pytest.raises(DiskError, match=text):  # Not the old bytes: they are stale.
            reading.result()
    with pytest.raises(DiskError, match=text):
        tier.read(extent, memoryview(bytearray(3 * BLOCK))).result()
    tier.write(extent, [(0, content)]).result()
    tier.read(extent, memoryview(bytearray(3 * BLOCK))).result()


@pytest.mark.usefixtures("python_blocks")
def test_a_failed_read_fails_its_future_only(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = tier.allocate("chunk", BLOCK)
    tier.write(extent, [(0, memoryview(bytes(BLOCK)))]).result()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(DiskError, match=r"cannot read 64\.0 KiB at offset 0.*dmesg"):
            tier.read(extent, memoryview(bytearray(BLOCK))).result()
    tier.read(extent, memoryview(bytearray(BLOCK))).result()


@pytest.mark.usefixtures("python_blocks")
def test_a_disk_that_fills_up_midway(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts of a transfer land and others do not: the extent is unreadable as a whole."""
    whole_write, lock, room = os.pwritev, threading.Lock(), [2]

    def fill_up(fd: int, views: list[memoryview], at: int) -> int:
        with lock:
            room[0] -= 1
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole_write(fd, views, at)

    nbytes = 20 * MiB
    extent = tier.allocate("chunk", nbytes)
    monkeypatch.setattr(os, "pwritev", fill_up)
    futures = [tier.write(extent, [(0, memoryview(bytes(nbytes)))]) for _ in range(2)]
    futures.append(tier.read(extent, memoryview(bytearray(nbytes))))
    for future in futures:
        with pytest.raises(DiskError, match="No space left"):
            future.result()


# --- limits -----------------------------------------------------------------------------------


def test_the_limit_is_named_and_kept(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], limit_bytes=10 * BLOCK, block_bytes=BLOCK)
    first = tier.allocate("first", 6 * BLOCK)
    with pytest.raises(DiskError) as raised:
        tier.allocate("second", 5 * BLOCK)
    assert str(raised.value) == (
        f"cannot place 320.0 KiB ('second') on disk: 384.0 KiB used of the limit of 640.0 KiB in "
        f"{tmp_path}. Raise disk_limit (to at least 704.0KiB for this alone), or keep more in ram."
    )
    tier.free(first)
    tier.allocate("second", 10 * BLOCK)
    tier.close()


def test_freed_bytes_count_until_the_file_system_has_them(tmp_path: Path) -> None:
    """Fragments of the file that no new extent fits in are given back, so the file stays small."""
    tier = DiskTier([tmp_path], limit_bytes=10 * BLOCK, block_bytes=BLOCK)
    content = os.urandom(10 * BLOCK)
    extents = [tier.allocate(f"chunk {i}", BLOCK) for i in range(10)]
    for extent in extents:
        tier.write(extent, [(0, memoryview(content)[:BLOCK])]).result()
    for extent in extents[::2]:
        tier.free(extent)
    large = tier.allocate("large", 5 * BLOCK)
    tier.write(large, [(0, memoryview(content)[: 5 * BLOCK])]).result()
    assert os.stat(chunks_file(tier)).st_blocks * 512 <= 10 * BLOCK + 16 * 4096  # And metadata.
    for extent in extents[1::2]:
        tier.read(extent, memoryview(bytearray(BLOCK))).result()
    tier.close()


def test_the_limit_is_kept_where_holes_cannot_be_punched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeepo.memory.files.ScratchFile.punch", lambda *_: False)
    tier = DiskTier([tmp_path], limit_bytes=4 * BLOCK, block_bytes=BLOCK)
    extents = [tier.allocate(f"chunk {i}", BLOCK) for i in range(4)]
    tier.free(extents[0])
    tier.free(extents[2])
    with pytest.raises(DiskError, match=r"128\.0 KiB used of the limit.*too fragmented"):
        tier.allocate("large", 2 * BLOCK)
    assert tier.used_bytes == 2 * BLOCK
    tier.allocate("small", BLOCK)
    tier.close()


def test_allocate_waits_for_pending_frees(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], limit_bytes=8 * MiB)
    content = memoryview(os.urandom(8 * MiB))
    for _ in range(10):
        extent = tier.allocate("chunk", 8 * MiB)
        tier.write(extent, [(0, content)])
        tier.free(extent)
    tier.close()


def test_staging_is_paid_for_by_the_pool(tmp_path: Path) -> None:
    ledger = Ledger("ram", 64 * MiB)
    pool = BufferPool(ledger)
    tier = DiskTier([tmp_path], pool=pool)
    assert ledger.by_tag() == {"staging": tier.staging_bytes}
    tier.close()
    assert pool.idle_bytes == ledger.used_bytes
    pool.trim()
    assert ledger.used_bytes == 0
    with pytest.raises(BudgetError):
        DiskTier([tmp_path], pool=BufferPool(Ledger("ram", MiB)))
    assert list(tmp_path.iterdir()) == []


def test_the_ram_tier_gives_everything_back_at_close() -> None:
    pool = BufferPool(Ledger("ram", 2 * MiB))
    tier = RamTier(pool)
    tier.allocate("chunk", MiB)
    with pytest.raises(BudgetError, match=r"ram tier 1\.0 MiB"):
        tier.allocate("chunk", MiB + 1)
    tier.close()
    assert pool.ledger.used_bytes == pool.idle_bytes == MiB


# --- directories ------------------------------------------------------------------------------


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"missing does not exist\. Create it first"):
        DiskTier([tmp_path, tmp_path / "missing"])
    assert list(tmp_path.iterdir()) == []  # The first directory is clean again.


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="not a directory"):
        DiskTier([tmp_path / "file"])
    with pytest.raises(DiskError, match=r"below.*Not a directory"):
        DiskTier([tmp_path / "file" / "below"])


def test_an_unwritable_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DiskError, match="/proc"):  # Not writable for root either.
        DiskTier([Path("/proc")])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskError, match=r"is not writable for user .* Change its permissions"):
        DiskTier([tmp_path])


def test_a_full_directory_is_refused_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", fail_with(errno.ENOSPC))
    with pytest.raises(DiskError, match="No space left"):
        DiskTier([tmp_path], direct=True)
    assert list(tmp_path.iterdir()) == []


def test_small_extents_spread_over_the_directories(tmp_path: Path) -> None:
    """One block each: an extent continues the cycle where the last one left it."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    tier = DiskTier(folders, block_bytes=BLOCK, weights=[4.0, 1.0, 3.0])
    for i in range(64):
        tier.allocate(f"chunk {i}", BLOCK)
    used = [directory.space.used_bytes // BLOCK for directory in tier.directories]
    assert used == [32, 8, 24]
    tier.close()


@pytest.mark.parametrize("refused_call", ["open", "pwritev"])
def test_direct_io_is_found_out_per_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_call: str
) -> None:
    """A file system may refuse at open (tmpfs before Linux 6.6) or at the first transfer."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.mkdir()
    slow.mkdir()
    whole_open, whole_write = os.open, os.pwritev

    def is_slow_and_direct(fd: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path.startswith(str(slow)) and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def refuse_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT and str(path).startswith(str(slow)):
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole_open(path, flags, *args, **kwargs)

    def refuse_write(fd: int, views: list[memoryview], at: int) -> int:
        if is_slow_and_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole_write(fd, views, at)

    refusals = {"open": refuse_open, "pwritev": refuse_write}
    monkeypatch.setattr(os, refused_call, refusals[refused_call])
    with pytest.raises(DiskError, match=r"slow refuses direct I/O"):
        DiskTier([slow], direct=True)
    tier = DiskTier([fast, slow])  # Weights measured.
    assert tier.directories[1].is_direct is False
    content = os.urandom(9 * MiB + 3)
    extent = tier.allocate("chunk", len(content))
    target = bytearray(len(content))
    tier.write(extent, [(0, memoryview(content))])
    tier.read(extent, memoryview(target)).result()
    assert target == content
    folders = [directory.folder.path for directory in tier.directories]
    assert all(folder.exists() for folder in folders)
    tier.close()
    assert not any(folder.exists() for folder in folders)
