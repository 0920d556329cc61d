"""Private mappings of unlinked files: the bytes, their life, and disks that refuse."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeepo.errors import DiskError
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.reclaimable import ReclaimableSpace

PAGE = 4096


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def space(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReclaimableSpace]:
    disk = DiskTier([tmp_path], direct=request.param)
    yield ReclaimableSpace(disk)
    disk.close()


def as_bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.tensor([], dtype=torch.uint8).set_(storage).numpy())


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, (1 << 20) - 64, (9 << 20) + 4])
def test_bytes_come_back_and_can_be_written(space: ReclaimableSpace, nbytes: int) -> None:
    content = os.urandom(nbytes)
    storage = space.write("x", nbytes, [(0, memoryview(content))]).storage(0, nbytes)
    assert as_bytes(storage) == content
    tensor = torch.tensor([], dtype=torch.uint8).set_(storage)
    tensor.fill_(7)
    assert as_bytes(storage) == b"\7" * nbytes


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 70000)), max_size=5),
    st.booleans(),
)
def test_pieces_with_gaps(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]], is_direct: bool
) -> None:
    """(gap, length) each, whatever their alignment."""
    disk = DiskTier([tmp_path_factory.mktemp("disk")], direct=None if is_direct else False)
    expected = bytearray()
    pieces = []
    for gap, length in spans:
        expected += bytes(gap)
        piece = os.urandom(length)
        pieces.append((len(expected), memoryview(piece)))
        expected += piece
    mapping = ReclaimableSpace(disk).write("x", len(expected), pieces)
    disk.close()
    for offset, piece in pieces:
        if piece.nbytes:
            assert as_bytes(mapping.storage(offset, piece.nbytes)) == piece
    if expected:
        assert as_bytes(mapping.storage(0, len(expected))) == expected


def test_a_file_has_no_name_and_is_not_open(space: ReclaimableSpace, tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd")), sorted(tmp_path.rglob("*"))
    mappings = [space.write("x", PAGE, [(0, memoryview(bytes(PAGE)))]) for _ in range(20)]
    assert (sorted(os.listdir("/proc/self/fd")), sorted(tmp_path.rglob("*"))) == before
    assert len(mappings) == 20


def test_the_space_comes_back_with_the_last_storage(
    space: ReclaimableSpace, tmp_path: Path
) -> None:
    nbytes = 8 << 20
    # Another test's program may have left some: those in cycles go now, and those that torch never
    # frees, parameters whose hooks hold them, stay.
    gc.collect()
    others = maps_of("whole.bin")
    mapping = space.write("x", nbytes, [(0, memoryview(os.urandom(nbytes)))])
    low, high = mapping.storage(0, PAGE), mapping.storage(PAGE, PAGE)
    del mapping
    assert space.alive_bytes == nbytes
    assert maps_of("whole.bin") == others + 1
    del low
    assert maps_of("whole.bin") == others + 1
    del high
    assert space.alive_bytes == 0
    assert maps_of("whole.bin") == others


def maps_of(name: str) -> int:
    """How many mappings this process has of files of that name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/{name} (deleted)" in line for line in lines)


def test_a_full_disk_is_named(
    space: ReclaimableSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwritev(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwritev", pwritev)
        with pytest.raises(DiskError, match=r"'layer\.weight' \(8\.0 KiB\).*No space.*Free some"):
            space.write("layer.weight", 2 * PAGE, [(0, memoryview(bytes(2 * PAGE)))])
    assert space.alive_bytes == 0
    assert not list(tmp_path.rglob("whole.bin"))
    with pytest.raises(DiskError, match=r"TiB do not fit in ram.*Free another .* try again"):
        space.check_free(1 << 60)
    space.check_free(1)


def test_a_disk_limit_counts_what_is_alive(tmp_path: Path) -> None:
    disk = DiskTier([tmp_path], limit_bytes=3 * PAGE)
    space = ReclaimableSpace(disk)
    space.check_limit("x", 3 * PAGE)
    storage = space.write("x", PAGE, [(0, memoryview(bytes(PAGE)))]).storage(0, PAGE)
    with pytest.raises(DiskError, match=r"disk_limit \(to at least 16.0KiB"):
        space.check_limit("x", 3 * PAGE)
    del storage
    space.check_limit("x", 3 * PAGE)
    disk.close()
