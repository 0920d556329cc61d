"""The native kernels (native/), loaded with ctypes; they are built when zeepo is installed.

`available` tells whether they are there, `level` which instructions they use. Large updates are
split over as many threads as torch uses: ctypes lets go of the interpreter lock while a kernel
runs. Slices lie at multiples of 16 elements, where a cut changes no bit.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from zeepo import native
from zeepo.errors import ConfigError
from zeepo.optim.formats import Format
from zeepo.optim.updates import Update

MAX_STATES = 3
SLICE = 512
"""Slices for threads begin at multiples of it: the kernels' own tile."""
LEAST_PER_THREAD = 1 << 16
"""Elements: below it, starting a thread's work costs more than it saves."""
SLICES_PER_THREAD = 32
"""More than one, because a thread whose core is taken for a while should have less to do."""

_FORMATS = {Format.FP32: 0, Format.BF16: 1, Format.PACKED: 2}
GRAD_IS_BF16, UNSCALES, CLIPS, MAXIMIZES, DECAYS_GRAD = 1, 2, 4, 8, 16
DECAYS_PARAM, AMSGRAD, NESTEROV, FIRST = 32, 64, 128, 256


class _Update(ctypes.Structure):
    """As in native/kernels.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("states", ctypes.c_void_p * MAX_STATES),
        ("algorithm", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("salts", ctypes.c_uint32 * MAX_STATES),
        ("grad_scale", ctypes.c_float),
        ("clip_factor", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("rate", ctypes.c_float),
        ("weight1", ctypes.c_float),
        ("weight2", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("correction", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


def _declare(library: ctypes.CDLL) -> None:
    library.zeepo_best_level.restype = ctypes.c_int32
    library.zeepo_level_name.restype = ctypes.c_char_p
    library.zeepo_float_mode.restype = ctypes.c_uint64
    library.zeepo_update.argtypes = [
        ctypes.POINTER(_Update),
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_uint64,
    ]


_library = native.load(__file__, "_kernels", _Update, "zeepo_update_bytes", _declare)
_level = 0 if _library is None else int(_library.zeepo_best_level())
_is_off = False
_pool: ThreadPoolExecutor | None = None
_pool_size = 0

available = _library is not None
"""Whether the kernels were built; without them torch's operations give the same results."""


def _names(library: ctypes.CDLL | None) -> list[str]:
    if library is None:
        return []
    names = (library.zeepo_level_name(number).decode() for number in range(_level + 1))
    return list(dict.fromkeys(names))


levels = _names(_library)
"""The instruction sets this machine can run, lowest first."""
level = levels[-1] if levels else "torch"
"""The one in use, or "torch" without kernels."""


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use another level for a while, or "torch": for tests and measurements."""
    global _level, _is_off, level
    before = (_level, _is_off, level)
    if name != "torch" and name not in levels:
        raise ConfigError(f"no kernels for {name!r} on this machine: there are {levels}.")
    _is_off = name == "torch"
    _level = 0 if _is_off else levels.index(name)
    level = name
    try:
        yield
    finally:
        _level, _is_off, level = before


def in_use() -> bool:
    """Whether updates of ordinary tensors go to the kernels."""
    return _library is not None and not _is_off


def run(update: Update) -> None:
    """Carry out an update of contiguous, ordinary tensors in memory."""
    assert _library is not None
    call = _native(update)
    numel = update.numel
    mode = _library.zeepo_float_mode()
    parts = max(1, min(torch.get_num_threads(), numel // LEAST_PER_THREAD))
    if parts == 1:
        _library.zeepo_update(call, 0, numel, _level, mode)
        return
    slices = _slices(numel, parts)  # each thread takes the next: a late one takes fewer
    pool = _threads(parts - 1)
    futures = [pool.submit(_run_slices, call, slices, mode) for _ in range(parts - 1)]
    try:
        _run_slices(call, slices, mode)
    finally:
        wait(futures)  # they write to memory that is only lent for this call
    for future in futures:
        future.result()


def _slices(numel: int, parts: int) -> deque[tuple[int, int]]:
    """Where each slice starts and how long it is: as many for each thread."""
    each = max(1, min(SLICES_PER_THREAD, numel // (parts * LEAST_PER_THREAD)))
    size = -(-numel // (parts * each * SLICE)) * SLICE
    return deque((start, min(size, numel - start)) for start in range(0, numel, size))


def _run_slices(call: _Update, slices: deque[tuple[int, int]], mode: int) -> None:
    assert _library is not None
    with suppress(IndexError):
        while True:
            start, count = slices.popleft()
            _library.zeepo_update(call, start, count, _level, mode)


def _native(update: Update) -> _Update:
    rule = update.rule
    flags = (
        (update.grad.dtype is torch.bfloat16) * GRAD_IS_BF16
        | (update.grad_scale is not None) * UNSCALES
        | (update.clip_factor is not None) * CLIPS
        | rule.maximize * MAXIMIZES
        | (rule.weight_decay != 0) * DECAYS_GRAD
        | (rule.decay is not None) * DECAYS_PARAM
        | rule.amsgrad * AMSGRAD
        | rule.nesterov * NESTEROV
        | rule.is_first * FIRST
    )
    states = [*update.states, *[None] * (MAX_STATES - len(update.states))]
    return _Update(
        values=_address(update.values),
        narrow=_address(update.narrow),
        grad=_address(update.grad),
        states=(ctypes.c_void_p * MAX_STATES)(*map(_address, states)),
        algorithm=int(rule.algorithm),
        format=_FORMATS[update.format],
        flags=flags,
        salts=(ctypes.c_uint32 * MAX_STATES)(*map(update.salt, range(MAX_STATES))),
        grad_scale=1.0 if update.grad_scale is None else update.grad_scale,
        clip_factor=1.0 if update.clip_factor is None else update.clip_factor,
        weight_decay=rule.weight_decay,
        decay=1.0 if rule.decay is None else rule.decay,
        rate=rule.rate,
        weight1=rule.weight1,
        weight2=rule.weight2,
        beta2=rule.beta2,
        correction=rule.correction,
        eps=rule.eps,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < count:
        if _pool is not None:
            _pool.shutdown()
        _pool, _pool_size = ThreadPoolExecutor(count, "zeepo-update"), count
    return _pool


def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _pool_size
    _pool, _pool_size = None, 0


os.register_at_fork(after_in_child=_forget_threads)
