"""The native way to move blocks against the library whose checksums it takes."""

import ctypes
import os

import pytest
from xxhash import xxh3_64_intdigest

from zeepo.memory import native_blocks
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.mapping import Mapping

pytestmark = pytest.mark.skipif(native_blocks.library is None, reason="nothing was compiled")
BLOCK = 64 << 10


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
def test_both_ways_write_the_same_file(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, direct: bool | None
) -> None:
    """The same bytes, padding included, and the same checksums."""
    nbytes = 5 * BLOCK + 4097
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
        tier = DiskTier([tmp_path], block_bytes=BLOCK, direct=direct)  # type: ignore[list-item]
        extents = [tier.allocate(name, nbytes) for name in cases]
        for extent, pieces in zip(extents, cases.values(), strict=True):
            tier.write(extent, pieces).result()
        files.append(tier.directories[0].file.path.read_bytes())
        checksums.append([list(extent.checksums) for extent in extents])  # type: ignore[attr-defined]
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
