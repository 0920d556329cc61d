"""The native way to move blocks against the library whose checksums it takes."""

import ctypes
import os

import pytest
from xxhash import xxh3_64_intdigest

from zeepo.errors import CorruptionError, DiskError
from zeepo.memory import native_blocks
from zeepo.memory.block_io import GRAIN_BYTES
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.mapping import Mapping

pytestmark = pytest.mark.skipif(native_blocks.library is None, reason="nothing was compiled")
BLOCK = 64 << 10
GRAINS = 2 * GRAIN_BYTES + 4096
"""A block of three grains, the last of them short."""


@pytest.mark.parametrize("nbytes", [1, 16, 240, 241, 1023, 1024, 1025, 4096, 4 << 20])
@pytest.mark.parametrize("name", ["zeepo_checksum", "zeepo_checksum_base"])
def test_checksums_are_those_of_xxhash(name: str, nbytes: int) -> None:
    assert native_blocks.library is not None
    checksum = getattr(native_blocks.library, name)
    checksum.restype = ctypes.c_uint64
    checksum.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    area = Mapping(nbytes + 3)
    for start in (0, 3):
        view = area.memory[start : start + nbytes]
        view[:] = os.urandom(nbytes)
        assert checksum(area.address + start, nbytes) == xxh3_64_intdigest(view)


@pytest.mark.parametrize("direct", [None, False], ids=["auto", "buffered"])
@pytest.mark.parametrize("block_bytes", [BLOCK, GRAINS], ids=["one grain", "three grains"])
def test_both_ways_write_the_same_file(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, direct: bool | None, block_bytes: int
) -> None:
    """The same bytes, padding included, and the same checksums."""
    nbytes = 5 * block_bytes + 4097
    content = Mapping(nbytes)
    content.memory[:nbytes] = os.urandom(nbytes)
    view = content.memory
    cases = {
        "whole": [(0, view[:nbytes])],
        "unaligned": [(0, view[1:nbytes])],
        "with gaps": [(7, view[:BLOCK]), (2 * BLOCK, view[:BLOCK]), (4 * BLOCK + 3, view[5:99])],
        "ends in a gap": [(BLOCK, view[: 2 * BLOCK])],
        "one byte": [(nbytes - 1, view[:1])],
        "nothing": [],
    }
    files, checksums = [], []
    for library in (native_blocks.library, None):
        monkeypatch.setattr(native_blocks, "library", library)
        tier = DiskTier([tmp_path], block_bytes=block_bytes, direct=direct)  # type: ignore[list-item]
        extents = [tier.allocate(name, nbytes) for name in cases]
        for extent, pieces in zip(extents, cases.values(), strict=True):
            tier.write(extent, pieces).result()
        files.append(tier.directories[0].file.path.read_bytes())
        checksums.append([[b.checksums for b in extent.blocks] for extent in extents])  # type: ignore[attr-defined]
        target = bytearray(nbytes)
        for extent, pieces in zip(extents, cases.values(), strict=True):
            tier.read(extent, memoryview(target)).result()
            expected = bytearray(nbytes)
            for low, piece in pieces:
                expected[low : low + piece.nbytes] = piece
            assert target == expected
        tier.close()
    assert files[0] == files[1]
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("place", [0, GRAIN_BYTES - 1, GRAIN_BYTES, 2 * GRAIN_BYTES, GRAINS - 1])
@pytest.mark.parametrize("block", [0, 3, 6])
def test_one_bit_in_any_grain_is_found_in_its_block(
    tmp_path: object, place: int, block: int
) -> None:
    nbytes = 6 * GRAINS + GRAINS // 2
    if block == 6:
        place //= 3
    content = Mapping(nbytes)
    content.memory[:nbytes] = os.urandom(nbytes)
    tier = DiskTier([tmp_path], block_bytes=GRAINS)  # type: ignore[list-item]
    extent = tier.allocate("a", nbytes)
    tier.write(extent, [(0, content.memory[:nbytes])]).result()
    target = Mapping(nbytes)
    tier.read(extent, target.memory[:nbytes]).result()
    assert target.memory[:nbytes] == content.memory[:nbytes]
    with tier.directories[0].file.path.open("r+b") as file:
        file.seek(block * GRAINS + place)
        byte = file.read(1)[0]
        file.seek(block * GRAINS + place)
        file.write(bytes([byte ^ 4]))
    low, high = block * GRAINS, min((block + 1) * GRAINS, nbytes)
    with pytest.raises(CorruptionError, match=f"its bytes {low} to {high} "):
        tier.read(extent, target.memory[:nbytes]).result()
    tier.close()


def test_a_file_that_ends_too_soon_fails_after_what_was_read_is_checked(tmp_path: object) -> None:
    """The first block is wrong, the last is not there: what is said is what comes first."""
    nbytes = 3 * GRAINS
    content = Mapping(nbytes)
    content.memory[:nbytes] = os.urandom(nbytes)
    tier = DiskTier([tmp_path], block_bytes=GRAINS)  # type: ignore[list-item]
    extent = tier.allocate("a", nbytes)
    tier.write(extent, [(0, content.memory[:nbytes])]).result()
    path = tier.directories[0].file.path
    os.truncate(path, 2 * GRAINS)
    with pytest.raises(DiskError, match="ends"):
        tier.read(extent, content.memory[:nbytes]).result()
    with path.open("r+b") as file:
        file.write(b"other bytes")
    with pytest.raises(CorruptionError, match=f"its bytes 0 to {GRAINS} "):
        tier.read(extent, content.memory[:nbytes]).result()
    tier.close()
