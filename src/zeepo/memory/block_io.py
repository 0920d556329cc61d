"""Moves the blocks of one extent between memory and scratch files, checking every block.

Invariant: a block's checksum is taken from the bytes as they are sent to the file, and a read
completes only after every block it brought back has the checksum of its last write. Memory that is
aligned as the file demands moves without a copy; the rest (unaligned memory, blocks with gaps, an
end that is not a whole page) goes through this thread's staging buffer, a block at a time.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from zeepo.errors import CorruptionError
from zeepo.memory.files import ScratchFile
from zeepo.memory.mapping import Mapping, round_up
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Describe, Extent, Piece, assemble
from zeepo.units import format_bytes


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Blocks of an extent that lie one after the other in one file."""

    file: ScratchFile
    offset: int
    blocks: tuple[int, ...]


class DiskExtent(Extent):
    """An extent with its places on disk and the checksum of each block."""

    def __init__(
        self, label: str, nbytes: int, describe: Describe | None, block_bytes: int
    ) -> None:
        super().__init__(label, nbytes, describe)
        self.block_bytes = block_bytes
        self.num_blocks = -(-nbytes // block_bytes)
        self.checksums = [0] * self.num_blocks
        self.regions: list[tuple[int, int]] = []
        """Per directory the offset and length of this extent's region in its file."""
        self.parts: list[PartPlan] = []

    def block_range(self, block: int) -> tuple[int, int]:
        low = block * self.block_bytes
        return low, min(low + self.block_bytes, self.nbytes)


class BlockIO:
    """Runs parts; one staging buffer per thread, with room for one block."""

    def __init__(self, block_bytes: int, staging: Sequence[Buffer | Mapping]) -> None:
        self._block_bytes = block_bytes
        self._staging = [(buffer.memory, buffer.address) for buffer in staging]

    def write_part(
        self, extent: DiskExtent, part: PartPlan, pieces: Sequence[Piece], thread_index: int
    ) -> None:
        staging, staging_address = self._staging[thread_index]
        alignment = part.file.alignment_bytes
        sources: list[memoryview] = []
        offset, is_staging_used = part.offset, False
        for i, block in enumerate(part.blocks):
            low, high = extent.block_range(block)
            piece = _covering(pieces, low, high)
            direct_bytes = 0
            if piece is not None and (piece.address + low - piece.low) % alignment == 0:
                direct_bytes = (high - low) // alignment * alignment
            staged_bytes = high - low - direct_bytes
            if staged_bytes and is_staging_used:
                part.file.write(offset, sources)
                sources, offset = [], part.offset + i * self._block_bytes
            if piece is not None and direct_bytes:
                source = piece.memory[low - piece.low : high - piece.low]
                extent.checksums[block] = xxh3_64_intdigest(source)
                sources.append(source[:direct_bytes])
            if staged_bytes:
                is_staging_used = True
                padded_bytes = round_up(staged_bytes, alignment)
                assemble(pieces, low + direct_bytes, high, staging_address)
                ctypes.memset(staging_address + staged_bytes, 0, padded_bytes - staged_bytes)
                if not direct_bytes:
                    extent.checksums[block] = xxh3_64_intdigest(staging[:staged_bytes])
                sources.append(staging[:padded_bytes])
        part.file.write(offset, sources)

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
        targets: list[memoryview] = []
        offset, from_staging = part.offset, (0, 0)
        for i, block in enumerate(part.blocks):
            low, high = extent.block_range(block)
            direct_bytes = 0
            if (target_address + low) % alignment == 0:
                direct_bytes = (high - low) // alignment * alignment
            staged_bytes = high - low - direct_bytes
            if staged_bytes and from_staging[1]:
                part.file.read(offset, targets)
                ctypes.memmove(from_staging[0], staging_address, from_staging[1])
                targets, offset = [], part.offset + i * self._block_bytes
            if direct_bytes:
                targets.append(target[low : low + direct_bytes])
            if staged_bytes:
                targets.append(staging[: round_up(staged_bytes, alignment)])
                from_staging = (target_address + low + direct_bytes, staged_bytes)
        part.file.read(offset, targets)
        ctypes.memmove(from_staging[0], staging_address, from_staging[1])
        for i, block in enumerate(part.blocks):
            low, high = extent.block_range(block)
            if xxh3_64_intdigest(target[low:high]) != extent.checksums[block]:
                raise self._corruption(extent, part, i)

    def _corruption(self, extent: DiskExtent, part: PartPlan, index: int) -> CorruptionError:
        low, high = extent.block_range(part.blocks[index])
        offset = part.offset + index * self._block_bytes
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
