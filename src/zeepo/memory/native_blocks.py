"""The native way to move blocks (native/block_io.c), loaded with ctypes; built with zeepo.

A call reads or writes all blocks of a part and checks them without the interpreter's lock, so that
training does not wait for it. Without a compiler `library` is None and `block_io` does the same
from Python, with the same checksums.
"""

import ctypes
from collections.abc import Sequence

from zeepo.memory.tier import Piece
from zeepo.native import load

FILE_ENDED, WRONG_CHECKSUM = -1, -2


class NativePart(ctypes.Structure):
    """As in native/block_io.c."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("alignment", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("grain_bytes", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("checksums", ctypes.c_void_p),
    )


class _NativePiece(ctypes.Structure):
    _fields_ = (("low", ctypes.c_int64), ("high", ctypes.c_int64), ("memory", ctypes.c_void_p))


def native_pieces(pieces: Sequence[Piece]) -> "ctypes.Array[_NativePiece]":
    return (_NativePiece * len(pieces))(*(_NativePiece(p.low, p.high, p.address) for p in pieces))


def read_blocks(
    native: ctypes.CDLL,
    part: NativePart,
    team: int | None,
    target_address: int,
    staging_address: int,
) -> tuple[int, int]:
    """How many blocks came back right, and why the next did not: an errno or one of the above."""
    failure = ctypes.c_int32(0)
    done = native.zeepo_read_blocks(
        ctypes.byref(part), team, target_address, staging_address, ctypes.byref(failure)
    )
    return done, failure.value


def write_blocks(
    native: ctypes.CDLL,
    part: NativePart,
    team: int | None,
    pieces: "ctypes.Array[_NativePiece]",
    staging_address: int,
) -> tuple[int, int]:
    """How many blocks were written, and the errno of the next."""
    failure = ctypes.c_int32(0)
    done = native.zeepo_write_blocks(
        ctypes.byref(part), team, pieces, len(pieces), staging_address, ctypes.byref(failure)
    )
    return done, failure.value


def _declare(native: ctypes.CDLL) -> None:
    address, count = ctypes.c_void_p, ctypes.c_int64
    native.zeepo_checksum.restype = ctypes.c_uint64
    native.zeepo_checksum.argtypes = [address, count]
    native.zeepo_read_blocks.restype = native.zeepo_write_blocks.restype = count
    native.zeepo_read_blocks.argtypes = [address, address, address, address, address]
    native.zeepo_write_blocks.argtypes = [address, address, address, count, address, address]
    native.zeepo_team_new.restype = address
    native.zeepo_team_new.argtypes = [ctypes.c_int32]
    native.zeepo_team_free.argtypes = [address]


library = load(__file__, "_block_io", NativePart, "zeepo_part_bytes", _declare)
"""None without a compiler."""
