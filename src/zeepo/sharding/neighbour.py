"""Reading the memory of another process of the same host: one copy, no file, nothing left behind.

`process_vm_readv` needs the owner's consent: both processes belong to the same user, and where the
system restricts it, the owner has to agree (`prctl`). Whether it works is tried, not assumed.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MOST_BYTES = 1 << 30
_MOST_PLACES = 512
_CARD = "<qq16s"


class Place(NamedTuple):
    """Bytes of another process, and where in the target they belong."""

    offset: int
    address: int
    nbytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "process_vm_readv") else None


def host_name() -> bytes:
    """Names what shares memory: the running kernel, and the namespaces of network and processes.

    Two network namespaces are two hosts, as far as zeepo is concerned.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    where = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    for kind in ("net", "pid"):
        link = Path(f"/proc/self/ns/{kind}")
        where.append(os.readlink(link) if link.is_symlink() else "")
    return "|".join(where).encode()


def allow_reading() -> None:
    """Let other processes of this user read our memory, where the system asks for consent."""
    libc = _libc()
    if libc is not None and Path("/proc/sys/kernel/yama/ptrace_scope").exists():
        libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class Card:
    """Tells others how to find out whether they can read our memory; keep it while they look."""

    def __init__(self) -> None:
        allow_reading()
        self._secret = bytearray(os.urandom(16))

    def encode(self) -> bytes:
        address = address_of(memoryview(self._secret))
        return struct.pack(_CARD, os.getpid(), address, bytes(self._secret)) + host_name()


def process_of(card: bytes) -> int | None:
    """The process that made a card, if it is on this host and its memory can be read."""
    size = struct.calcsize(_CARD)
    pid, address, secret = struct.unpack(_CARD, card[:size])
    if card[size:] != host_name():
        return None
    seen = bytearray(16)
    try:
        read_memory(pid, [Place(0, address, 16)], memoryview(seen))
    except OSError:
        return None  # not allowed here: bytes are sent instead
    return int(pid) if seen == secret else None


def read_memory(pid: int, places: Sequence[Place], target: memoryview) -> None:
    """Copy from another process; OSError when the system refuses, or the process is gone."""
    libc = _libc()
    if libc is None:
        raise OSError("this system has no process_vm_readv")
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    here = address_of(target)
    for batch in _batches(places):
        local = (_Vector * len(batch))(*(_Vector(here + p.offset, p.nbytes) for p in batch))
        remote = (_Vector * len(batch))(*(_Vector(p.address, p.nbytes) for p in batch))
        wanted = sum(p.nbytes for p in batch)
        copied = libc.process_vm_readv(
            pid, local, len(batch), remote, len(batch), ctypes.c_ulong(0)
        )
        if copied != wanted:
            error = ctypes.get_errno()
            raise OSError(error, f"reading the memory of process {pid}: {os.strerror(error)}")


def _batches(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Places in portions that one call takes."""
    batch: list[Place] = []
    nbytes = 0
    for place in places:
        for low in range(0, place.nbytes, _MOST_BYTES):
            part = Place(
                place.offset + low, place.address + low, min(_MOST_BYTES, place.nbytes - low)
            )
            if batch and (len(batch) == _MOST_PLACES or nbytes + part.nbytes > _MOST_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(part)
            nbytes += part.nbytes
    if batch:
        yield batch


def address_of(memory: memoryview) -> int:
    """Where writable bytes lie; 0 if there are none."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if memory.nbytes else 0
