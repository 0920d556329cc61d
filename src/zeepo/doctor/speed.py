"""What is slow here: measured in a moment, to be read as a hint and not as a benchmark."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from zeepo.doctor.finding import Finding, State
from zeepo.doctor.machine import num_cores
from zeepo.units import MiB

SECTION = "Speed"
_MATRIX_WIDTH = 384
_LEAST_MEASURED_SECONDS = 0.1
_COPIED_BYTES = 128 * MiB
_SLOW_COPY_BYTES_PER_SECOND = 2e9


def speed_findings() -> Iterator[Finding]:
    """Threads, matrix products in two precisions, copying memory."""
    yield _load()
    yield _threads()
    yield from _products()
    yield _copying()


def _load() -> Finding:
    load, cores = os.getloadavg()[0], num_cores()
    text = f"{load:.1f} programs wanted a core in the last minute"
    if load < cores + 1:
        return Finding(SECTION, "load", text, load)
    advice = "Others are at work here: what is measured now is less than the machine can do."
    return Finding(SECTION, "load", text, load, State.WARNING, advice)


def _threads() -> Finding:
    threads, cores = torch.get_num_threads(), num_cores()
    text = f"{threads} for {cores} core{'' if cores == 1 else 's'}"
    if threads == cores:
        return Finding(SECTION, "torch's threads", text, threads)
    few = "Cores are idle" if threads < cores else "Threads wait for each other"
    advice = (
        f"{few}: OMP_NUM_THREADS={cores} before Python starts would use them as they are. zeepo "
        "never changes the number, because it changes bits."
    )
    return Finding(SECTION, "torch's threads", text, threads, State.SLOW, advice)


def _products() -> Iterator[Finding]:
    operations = 2 * _MATRIX_WIDTH**3
    speeds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(_MATRIX_WIDTH, _MATRIX_WIDTH, dtype=dtype)
        speeds[dtype] = operations / _least_seconds(partial(torch.mm, matrix, matrix))
    single, half = speeds[torch.float32], speeds[torch.bfloat16]
    yield Finding(SECTION, "fp32 products", f"{single / 1e9:.0f} GFLOP/s", single)
    text = f"{half / 1e9:.0f} GFLOP/s, {half / single:.2g} times fp32"
    if half >= 0.8 * single:
        yield Finding(SECTION, "bf16 products", text, half)
    else:
        advice = (
            "Compute in fp32 here: bf16 (also by torch.autocast) makes training slower, and saves "
            "memory only."
        )
        yield Finding(SECTION, "bf16 products", text, half, State.SLOW, advice)


def _copying() -> Finding:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    speed = _COPIED_BYTES / _least_seconds(lambda: target.copy_(source))
    text = f"{speed / 1e9:.1f} GB/s"
    if speed >= _SLOW_COPY_BYTES_PER_SECOND:
        return Finding(SECTION, "copying memory", text, speed)
    advice = "Slow memory, or other programs use it: updates of the optimizer will take long."
    return Finding(SECTION, "copying memory", text, speed, State.SLOW, advice)


def _least_seconds(work: Callable[[], object]) -> float:
    """The fastest of several times: the least disturbed by others."""
    work()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < _LEAST_MEASURED_SECONDS:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)
