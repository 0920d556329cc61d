"""What this machine has: processors, memory, Python and torch. Reads, and measures nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from zeepo.doctor.finding import Finding, State
from zeepo.memory.mapping import HUGE_PAGE_BYTES, Mapping
from zeepo.planner.machine import available_ram_bytes, cgroup_limits
from zeepo.units import format_bytes

SECTION = "This machine"
SYSTEM_SECTION = "What of the system zeepo can use"


def machine_findings() -> Iterator[Finding]:
    """Programs, processors, memory."""
    yield Finding(SECTION, "system", platform.platform(), platform.platform())
    yield Finding(SECTION, "python", platform.python_version(), platform.python_version())
    yield _torch()
    yield _accelerator()
    yield _cores()
    yield from _memory()


def _torch() -> Finding:
    build = torch.__config__.show()
    parts = [name for name in ("MKL-DNN", "OpenMP") if name in build]
    blas = re.search(r"BLAS_INFO=(\w+)", build)
    parts += [blas.group(1)] if blas else []
    parts.append(torch.backends.cpu.get_cpu_capability())
    return Finding(SECTION, "torch", f"{torch.__version__} ({', '.join(parts)})", torch.__version__)


def _accelerator() -> Finding:
    if not torch.accelerator.is_available():
        return Finding(SECTION, "accelerator", "none")
    device = torch.accelerator.current_accelerator()
    advice = "This version of zeepo trains on the CPU only."
    return Finding(SECTION, "accelerator", str(device), str(device), State.WARNING, advice)


def num_cores() -> int:
    """Processors we may use: affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many processors' time the cgroup gives, or None for all."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():  # "max" and -1 are no limit
            return int(quota) / int(period)
    return None


def _cores() -> Finding:
    cores, present = num_cores(), os.cpu_count() or 1
    text = f"{cores}" if cores == present else f"{cores} of the machine's {present}"
    return Finding(SECTION, "cores", text, cores)


def _memory() -> Iterator[Finding]:
    info = _meminfo()
    total, free = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    text = f"{format_bytes(total)}, {format_bytes(free)} available"
    yield Finding(SECTION, "RAM", text, {"total": total, "available": free})
    limits = cgroup_limits()
    if limits:
        tightest = min(limits, key=lambda one: one.limit_bytes - one.used_bytes)
        text = (
            f"version {tightest.version}, {format_bytes(tightest.used_bytes)} used of "
            f"{format_bytes(tightest.limit_bytes)}"
        )
        yield Finding(SECTION, "memory cgroup", text, tightest._asdict())
    else:
        yield Finding(SECTION, "memory cgroup", "no limit")
    budget = available_ram_bytes()
    yield Finding(SECTION, "ram by default", f"{format_bytes(budget)} for a session", budget)
    yield _swap(info.get("SwapTotal", 0), info.get("SwapFree", 0))


def _swap(total: int, free: int) -> Finding:
    value = {"total": total, "used": total - free}
    if not total:
        return Finding(SECTION, "swap", "none", value)
    text = f"{format_bytes(total)}, {format_bytes(total - free)} used"
    if total - free < total // 10:
        return Finding(SECTION, "swap", text, value)
    advice = "The machine is short of memory: a session with less ram is faster than swapping."
    return Finding(SECTION, "swap", text, value, State.SLOW, advice)


def _meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs}


# ---- What of the system helps


def system_findings() -> Iterator[Finding]:
    """Huge pages, moving pages, giving memory back."""
    yield _huge_pages()
    yield _moving_pages()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        yield Finding(SYSTEM_SECTION, "malloc_trim", "there: free memory goes back to the system")
    else:
        advice = "This C library keeps what torch frees: resident memory can exceed ram. Use glibc."
        yield Finding(SYSTEM_SECTION, "malloc_trim", "missing", None, State.WARNING, advice)


def _huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        chosen = None
    setting = chosen.group(1) if chosen else "not there"
    if setting in ("always", "madvise"):
        return Finding(SYSTEM_SECTION, "huge pages", setting, setting)
    advice = f"Disk transfers are about half as fast without. As root: echo madvise > {path}"
    return Finding(SYSTEM_SECTION, "huge pages", setting, setting, State.SLOW, advice)


def _moving_pages() -> Finding:
    giver, taker = Mapping(HUGE_PAGE_BYTES), Mapping(HUGE_PAGE_BYTES)
    giver.memory[:5] = b"zeepo"
    if taker.take_pages(0, giver) == HUGE_PAGE_BYTES and bytes(taker.memory[:5]) == b"zeepo":
        return Finding(SYSTEM_SECTION, "mremap", "there: buffers hand their pages on")
    advice = (
        "Buffers of new sizes have to be cleared by the system. Linux 5.7 or newer can move them."
    )
    return Finding(SYSTEM_SECTION, "mremap", "cannot move pages", None, State.SLOW, advice)
