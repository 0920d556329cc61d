"""Moves blocks of extents between memory and scratch files, checking every block.

Invariant: a block's checksum is taken from the bytes as they are sent to the file, and a read
completes only after every block it brought back has the checksum of its last write. Memory that is
aligned as the file demands moves without a copy; the rest (unaligned memory, blocks with gaps, an
end that is not a whole page) goes through this thread's staging buffer, a grain at a time.

The thread that moves a block checks it: several are on their way, so the disk goes on meanwhile.
`NativeBlocks` does that in C, `PythonBlocks` where nothing was compiled.
"""

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from zeepo.errors import CorruptionError
from zeepo.memory import native_blocks
from zeepo.memory.files import ScratchFile
from zeepo.memory.mapping import Mapping, address_of, round_up
from zeepo.memory.native_blocks import FILE_ENDED, WRONG_CHECKSUM, NativeBlock
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Describe, Extent, Piece, assemble
from zeepo.units import format_bytes

GRAIN_BYTES = 512 << 10
"""Every so many bytes of a block have a checksum, and so much is staged at once."""


class Block:
    """A run of bytes of an extent, where it lies in a file, and the checksums of its grains."""

    __slots__ = ("checksums", "file", "grain_bytes", "high", "low", "native", "offset")

    def __init__(
        self,
        low: int,
        high: int,
        file: ScratchFile,
        offset: int,
        grain_bytes: int = GRAIN_BYTES,
        checksums: memoryview | None = None,
    ) -> None:
        self.low = low
        self.high = high
        self.file = file
        self.offset = offset
        self.grain_bytes = grain_bytes
        if checksums is None:
            checksums = memoryview(array("Q", bytes(8 * -(-(high - low) // grain_bytes))))
        self.checksums = checksums
        self.native = NativeBlock(
            fd=file.fd,
            alignment=file.alignment_bytes,
            offset=offset,
            low=low,
            high=high,
            grain_bytes=grain_bytes,
            checksums=address_of(checksums),
        )

    def part(self, at: int, nbytes: int, low: int) -> "Block":
        """Whole grains of it, from byte `at` of the extent on, as if they were bytes `low` on.
        Their checksums are those of this block."""
        start = at - self.low
        first, stop = start // self.grain_bytes, -(-(start + nbytes) // self.grain_bytes)
        checksums = self.checksums[first:stop]
        return Block(low, low + nbytes, self.file, self.offset + start, self.grain_bytes, checksums)

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def take_checksums(self, content: memoryview, at: int = 0) -> None:
        """Of what the block holds from `at` on, where a grain begins."""
        for index, found in enumerate(self._checksums_of(content), at // self.grain_bytes):
            self.checksums[index] = found

    def is_right(self, content: memoryview) -> bool:
        return list(self._checksums_of(content)) == self.checksums.tolist()

    def _checksums_of(self, content: memoryview) -> Iterator[int]:
        for start, stop in self.grains(0, content.nbytes):
            yield xxh3_64_intdigest(content[start:stop])

    def grains(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        for start in range(low, high, self.grain_bytes):
            yield start, min(start + self.grain_bytes, high)


@dataclass(frozen=True)
class Run:
    """Whole grains in one block of an extent, and their place in memory."""

    at: int
    """Byte of the extent."""
    low: int
    """Byte of the memory."""
    nbytes: int


class DiskExtent(Extent):
    """An extent with its places on disk."""

    def __init__(self, label: str, nbytes: int, describe: Describe | None) -> None:
        super().__init__(label, nbytes, describe)
        self.regions: list[tuple[int, int]] = []
        """Per directory the offset and length of this extent's region in its file."""
        self.blocks: list[Block] = []


class Sources:
    """What is written: sorted pieces, and the same as C wants them."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.native = native_blocks.native_pieces(pieces)


class BlockIO(Protocol):
    """Moves blocks; one staging buffer per thread, with room for one grain."""

    def write(self, block: Block, sources: Sources, thread_index: int) -> None: ...

    def read(
        self, extent: DiskExtent, block: Block, target: memoryview, address: int, thread_index: int
    ) -> None:
        """`target`, at `address`, has room for the whole extent."""


def block_io(staging: Sequence[Buffer | Mapping]) -> BlockIO:
    if native_blocks.library is None:
        return PythonBlocks(staging)
    return NativeBlocks(native_blocks.library, staging)


class NativeBlocks:
    def __init__(self, native: ctypes.CDLL, staging: Sequence[Buffer | Mapping]) -> None:
        self._native = native
        self._staging = [buffer.address for buffer in staging]

    def write(self, block: Block, sources: Sources, thread_index: int) -> None:
        pieces = sources.native
        failure = self._native.zeepo_write_block(
            ctypes.byref(block.native), pieces, len(pieces), self._staging[thread_index]
        )
        if failure:
            raise block.file.write_error(failure, block.offset, block.nbytes)

    def read(
        self, extent: DiskExtent, block: Block, target: memoryview, address: int, thread_index: int
    ) -> None:
        failure = self._native.zeepo_read_block(
            ctypes.byref(block.native), address, self._staging[thread_index]
        )
        if failure == WRONG_CHECKSUM:
            raise _corruption(extent, block)
        if failure == FILE_ENDED:
            raise block.file.end_error(block.offset, block.nbytes)
        if failure:
            raise block.file.read_error(failure, block.offset, block.nbytes)


class PythonBlocks:
    def __init__(self, staging: Sequence[Buffer | Mapping]) -> None:
        self._staging = [(buffer.memory, buffer.address) for buffer in staging]

    def write(self, block: Block, sources: Sources, thread_index: int) -> None:
        staging, staging_address = self._staging[thread_index]
        low, high, file = block.low, block.high, block.file
        piece = _covering(sources.pieces, low, high)
        direct_bytes = 0
        if piece is not None:
            direct_bytes = _direct_bytes(block, piece.address + low - piece.low)
        if piece is not None and direct_bytes:
            source = piece.memory[low - piece.low : high - piece.low]
            block.take_checksums(source)
            file.write(block.offset, [source[:direct_bytes]])
        for start, stop in block.grains(low + direct_bytes, high):
            padded_bytes = round_up(stop - start, file.alignment_bytes)
            assemble(sources.pieces, start, stop, staging_address)
            ctypes.memset(staging_address + stop - start, 0, padded_bytes - (stop - start))
            if not direct_bytes:
                block.take_checksums(staging[: stop - start], start - low)
            file.write(block.offset + start - low, [staging[:padded_bytes]])

    def read(
        self, extent: DiskExtent, block: Block, target: memoryview, address: int, thread_index: int
    ) -> None:
        staging, staging_address = self._staging[thread_index]
        low, high, file = block.low, block.high, block.file
        direct_bytes = _direct_bytes(block, address + low)
        if direct_bytes:
            file.read(block.offset, [target[low : low + direct_bytes]])
        for start, stop in block.grains(low + direct_bytes, high):
            padded_bytes = round_up(stop - start, file.alignment_bytes)
            file.read(block.offset + start - low, [staging[:padded_bytes]])
            ctypes.memmove(address + start, staging_address, stop - start)
        if not block.is_right(target[low:high]):
            raise _corruption(extent, block)


def _direct_bytes(block: Block, address: int) -> int:
    """How many bytes of a block move without a copy when its memory is at `address`."""
    alignment = block.file.alignment_bytes
    return 0 if address % alignment else block.nbytes // alignment * alignment


def _corruption(extent: DiskExtent, block: Block) -> CorruptionError:
    low, high = block.low, block.high
    return CorruptionError(
        f"{extent.name_range(low, high)} came back wrong from disk: its bytes {low} to {high} "
        f"({format_bytes(high - low)} at offset {block.offset} of {block.file.path}) do not have "
        f"the checksum they were written with. Check the disk (dmesg, smartctl), use another "
        f"directory, and resume from the last checkpoint."
    )


def _covering(pieces: Sequence[Piece], low: int, high: int) -> Piece | None:
    """The piece that holds all of [low, high), if one does."""
    index = bisect_right(pieces, low, key=lambda piece: piece.low) - 1
    if index >= 0 and pieces[index].high >= high:
        return pieces[index]
    return None
