"""Moves the blocks of one extent between memory and scratch files, checking every block.

Invariant: a block's checksum is taken from the bytes as they are sent to the file, and a read
completes only after every block it brought back has the checksum of its last write. Memory that is
aligned as the file demands moves without a copy; the rest (unaligned memory, blocks with gaps, an
end that is not a whole page) goes through this thread's staging buffer, a grain at a time.

`NativeBlocks` does that in C, `PythonBlocks` where nothing was compiled.
"""

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from zeepo.errors import CorruptionError
from zeepo.memory import native_blocks
from zeepo.memory.files import ScratchFile
from zeepo.memory.mapping import Mapping, round_up
from zeepo.memory.native_blocks import FILE_ENDED, WRONG_CHECKSUM, NativePart
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Describe, Extent, Piece, assemble
from zeepo.memory.transfers import Waiting
from zeepo.units import format_bytes

GRAIN_BYTES = 1 << 20
"""Every so many bytes of a block have a checksum: several threads can share a block."""


class DiskExtent(Extent):
    """An extent with its places on disk and the checksums of each block."""

    def __init__(
        self, label: str, nbytes: int, describe: Describe | None, block_bytes: int
    ) -> None:
        super().__init__(label, nbytes, describe)
        self.block_bytes = block_bytes
        self.num_blocks = -(-nbytes // block_bytes)
        self.grains_per_block = -(-block_bytes // GRAIN_BYTES)
        self.checksums = array("Q", bytes(8 * self.num_blocks * self.grains_per_block))
        """Of every block as many as a block has grains."""
        self.regions: list[tuple[int, int]] = []
        """Per directory the offset and length of this extent's region in its file."""
        self.parts: list[PartPlan] = []

    def block_range(self, block: int) -> tuple[int, int]:
        low = block * self.block_bytes
        return low, min(low + self.block_bytes, self.nbytes)

    def take_checksums(self, block: int, content: memoryview, low: int = 0) -> None:
        """Of what a block holds from `low` on, where a grain begins."""
        for index, found in self._found(block, content, low):
            self.checksums[index] = found

    def is_right(self, block: int, content: memoryview) -> bool:
        found_all = self._found(block, content, 0)
        return all(self.checksums[index] == found for index, found in found_all)

    def _found(self, block: int, content: memoryview, low: int) -> Iterator[tuple[int, int]]:
        """Where each grain's checksum is kept, and what it should be."""
        first = block * self.grains_per_block + low // GRAIN_BYTES
        for index, start in enumerate(range(0, content.nbytes, GRAIN_BYTES), first):
            yield index, xxh3_64_intdigest(content[start : start + GRAIN_BYTES])


class PartPlan:
    """Blocks of an extent that lie one after the other in one file."""

    __slots__ = ("blocks", "file", "native", "nbytes", "offset")

    def __init__(
        self, extent: DiskExtent, file: ScratchFile, offset: int, blocks: Sequence[int]
    ) -> None:
        self.file = file
        self.offset = offset
        self.blocks = array("q", blocks)
        ranges = [extent.block_range(block) for block in blocks]
        self.nbytes = sum(high - low for low, high in ranges)
        self.native = NativePart(
            fd=file.fd,
            alignment=file.alignment_bytes,
            offset=offset,
            block_bytes=extent.block_bytes,
            grain_bytes=GRAIN_BYTES,
            nbytes=extent.nbytes,
            num_blocks=len(blocks),
            blocks=self.blocks.buffer_info()[0],
            checksums=extent.checksums.buffer_info()[0],
        )

    def place(self, extent: DiskExtent, index: int) -> tuple[int, int]:
        """Where the part's block of this index is in the file, and its length."""
        low, high = extent.block_range(self.blocks[index])
        return self.offset + index * extent.block_bytes, high - low


class Sources:
    """What is written: sorted pieces, and the same as C wants them."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.native = native_blocks.native_pieces(pieces)


class BlockIO(Protocol):
    """Runs parts; one staging buffer per thread, with room for one grain."""

    def write_part(
        self, extent: DiskExtent, part: PartPlan, sources: Sources, thread_index: int
    ) -> None: ...

    def read_part(
        self,
        extent: DiskExtent,
        part: PartPlan,
        target: memoryview,
        target_address: int,
        thread_index: int,
    ) -> None: ...

    def close(self) -> None:
        """Once no part runs any more."""


def block_io(staging: Sequence[Buffer | Mapping], waiting: Waiting) -> BlockIO:
    if native_blocks.library is None:
        return PythonBlocks(staging)
    return NativeBlocks(native_blocks.library, staging, waiting)


class NativeBlocks:
    """While somebody waits for the disk, a team takes the checksums and the disk goes on meanwhile.
    Otherwise all cores compute: then each thread checks what it moves, which costs them least."""

    def __init__(
        self, native: ctypes.CDLL, staging: Sequence[Buffer | Mapping], waiting: Waiting
    ) -> None:
        self._native = native
        self._staging = [buffer.address for buffer in staging]
        self._waiting = waiting
        self._team = native.zeepo_team_new(len(staging))

    def _helpers(self) -> int | None:
        return self._team if self._waiting.num_threads else None

    def write_part(
        self, extent: DiskExtent, part: PartPlan, sources: Sources, thread_index: int
    ) -> None:
        staging = self._staging[thread_index]
        done, failure = native_blocks.write_blocks(
            self._native, part.native, self._helpers(), sources.native, staging
        )
        if done < len(part.blocks):
            raise part.file.write_error(failure, *part.place(extent, done))

    def read_part(
        self,
        extent: DiskExtent,
        part: PartPlan,
        target: memoryview,
        target_address: int,
        thread_index: int,
    ) -> None:
        staging = self._staging[thread_index]
        done, failure = native_blocks.read_blocks(
            self._native, part.native, self._helpers(), target_address, staging
        )
        if done == len(part.blocks):
            return
        if failure == WRONG_CHECKSUM:
            raise _corruption(extent, part, done)
        if failure == FILE_ENDED:
            raise part.file.end_error(*part.place(extent, done))
        raise part.file.read_error(failure, *part.place(extent, done))

    def close(self) -> None:
        team, self._team = self._team, None
        self._native.zeepo_team_free(team)


class PythonBlocks:
    def __init__(self, staging: Sequence[Buffer | Mapping]) -> None:
        self._staging = [(buffer.memory, buffer.address) for buffer in staging]

    def write_part(
        self, extent: DiskExtent, part: PartPlan, sources: Sources, thread_index: int
    ) -> None:
        staging, staging_address = self._staging[thread_index]
        alignment = part.file.alignment_bytes
        for i, block in enumerate(part.blocks):
            low, high = extent.block_range(block)
            offset = part.offset + i * extent.block_bytes - low
            piece = _covering(sources.pieces, low, high)
            at = low
            if piece is not None and (piece.address + low - piece.low) % alignment == 0:
                at += (high - low) // alignment * alignment
            is_direct = at > low
            if piece is not None and is_direct:
                source = piece.memory[low - piece.low : high - piece.low]
                extent.take_checksums(block, source)
                part.file.write(offset + low, [source[: at - low]])
            for start, stop in _grains(at, high):
                padded_bytes = round_up(stop - start, alignment)
                assemble(sources.pieces, start, stop, staging_address)
                ctypes.memset(staging_address + stop - start, 0, padded_bytes - (stop - start))
                if not is_direct:
                    extent.take_checksums(block, staging[: stop - start], start - low)
                part.file.write(offset + start, [staging[:padded_bytes]])

    def read_part(
        self,
        extent: DiskExtent,
        part: PartPlan,
        target: memoryview,
        target_address: int,
        thread_index: int,
    ) -> None:
        staging, staging_address = self._staging[thread_index]
        alignment = part.file.alignment_bytes
        for i, block in enumerate(part.blocks):
            low, high = extent.block_range(block)
            offset = part.offset + i * extent.block_bytes - low
            at = low
            if (target_address + low) % alignment == 0:
                at += (high - low) // alignment * alignment
            if at > low:
                part.file.read(offset + low, [target[low:at]])
            for start, stop in _grains(at, high):
                part.file.read(offset + start, [staging[: round_up(stop - start, alignment)]])
                ctypes.memmove(target_address + start, staging_address, stop - start)
            if not extent.is_right(block, target[low:high]):
                raise _corruption(extent, part, i)

    def close(self) -> None:
        pass


def _grains(low: int, high: int) -> Iterator[tuple[int, int]]:
    for start in range(low, high, GRAIN_BYTES):
        yield start, min(start + GRAIN_BYTES, high)


def _corruption(extent: DiskExtent, part: PartPlan, index: int) -> CorruptionError:
    low, high = extent.block_range(part.blocks[index])
    offset, _ = part.place(extent, index)
    return CorruptionError(
        f"{extent.name_range(low, high)} came back wrong from disk: its bytes {low} to {high} "
        f"({format_bytes(high - low)} at offset {offset} of {part.file.path}) do not have the "
        f"checksum they were written with. Check the disk (dmesg, smartctl), use another "
        f"directory, and resume from the last checkpoint."
    )


def _covering(pieces: Sequence[Piece], low: int, high: int) -> Piece | None:
    """The piece that holds all of [low, high), if one does."""
    index = bisect_right(pieces, low, key=lambda piece: piece.low) - 1
    if index >= 0 and pieces[index].high >= high:
        return pieces[index]
    return None
