"""The native way to move blocks (native/block_io.c), loaded with ctypes; built with zeepo.

A call reads or writes a block and checks it without the interpreter's lock, so that training does
not wait for it. Without a compiler `library` is None and `block_io` does the same from Python, with
the same checksums.
"""

import ctypes
from collections.abc import Sequence

from zeepo.memory.tier import Piece
from zeepo.native import load

FILE_ENDED, WRONG_CHECKSUM = -1, -2


class NativeBlock(ctypes.Structure):
    """As in native/block_io.c."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("alignment", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("grain_bytes", ctypes.c_int64),
        ("checksums", ctypes.c_void_p),
    )


class _NativePiece(ctypes.Structure):
    _fields_ = (("low", ctypes.c_int64), ("high", ctypes.c_int64), ("memory", ctypes.c_void_p))


def native_pieces(pieces: Sequence[Piece]) -> "ctypes.Array[_NativePiece]":
    return (_NativePiece * len(pieces))(*(_NativePiece(p.low, p.high, p.address) for p in pieces))


def _declare(native: ctypes.CDLL) -> None:
    address, count = ctypes.c_void_p, ctypes.c_int64
    native.zeepo_checksum.restype = ctypes.c_uint64
    native.zeepo_checksum.argtypes = [address, count]
    native.zeepo_read_block.restype = native.zeepo_write_block.restype = ctypes.c_int32
    native.zeepo_read_block.argtypes = [address, address, address]
    native.zeepo_write_block.argtypes = [address, address, count, address]


library = load(__file__, "_block_io", NativeBlock, "zeepo_block_bytes", _declare)
"""None without a compiler."""
