"""What does an optimizer step cost? zeepo.optim.AdamW against torch's and DeepSpeed's.

All contenders update tensors of the same size in turns, in one run; a turn's order changes from
round to round. Counted are nanoseconds for each parameter (the median over the rounds, and the
spread) and, from the bytes an update has to read and write, the share of this machine's copy
bandwidth. Two groups:

- fp32 parameters and gradients: torch's fused AdamW, DeepSpeedCPUAdam, and zeepo's AdamW with its
  three ways of keeping states;
- bf16 parameters with fp32 masters, clipped by a factor: zeepo's one pass, against torch's separate
  ones (gradient to fp32, mul_, fused step on the masters, copy_ to bf16).

DeepSpeed runs in an environment of its own (`make peers-env`; PEERS_PYTHON names another) and is
left out, in words, where there is none. Writes a JSON and a plot under benchmarks/results.

    python benchmarks/optimizer_speed.py [--parameters 100000000] [--rounds 9] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reporting
import torch
from torch import nn

import zeepo
from zeepo.optim import kernels

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
CLIP = 0.5
PAUSE_SECONDS = 0.02
"""Before each: an OpenMP team still turns for a while after its work, on the cores of the next."""
FORMAT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.25}

PEER_PROGRAM = """
import sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
torch.set_num_threads(int(sys.argv[2]))
p = torch.nn.Parameter(torch.full((int(sys.argv[1]),), 0.5))
p.grad = torch.full_like(p, 1e-3)
optimizer = DeepSpeedCPUAdam([p], adamw_mode=True)
optimizer.step()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    optimizer.step()
    print("seconds", time.perf_counter() - began, flush=True)
"""


@dataclass
class Contender:
    """One way to do a step."""

    name: str
    group: str
    run: Callable[[], float]
    """Does one and tells its seconds."""
    bytes_moved: float
    """For each parameter, what has to be read and written at least."""
    seconds: list[float] = field(default_factory=list)


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return run


def fp32_contenders(numel: int) -> list[Contender]:
    p = nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel)
    group = "fp32 parameters"
    fused = torch.optim.AdamW([p], fused=True)
    found = [Contender("torch fused", group, timed(fused.step), 12 + 4 * 4.0)]
    for state_dtype, size in FORMAT_BYTES.items():
        step = zeepo.optim.AdamW([p], state_dtype=state_dtype).step
        found.append(Contender(f"zeepo {state_dtype}", group, timed(step), 12 + 4 * size))
    return found


def bf16_contenders(numel: int) -> list[Contender]:
    p = nn.Parameter(torch.randn(numel).bfloat16())
    p.grad = torch.randn(numel).bfloat16()
    group = "bf16 parameters, masters, clip"
    found = [
        Contender("torch, separate passes", group, timed(separate_passes(p, True)), 12.0 + 16),
        Contender("torch, fp32 gradients", group, timed(separate_passes(p, False)), 14.0 + 16),
    ]
    for state_dtype, size in FORMAT_BYTES.items():
        optimizer = zeepo.optim.AdamW([p], state_dtype=state_dtype, master_weights=True)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.clip_factor = CLIP
            optimizer.step()

        found.append(Contender(f"zeepo {state_dtype}", group, timed(step), 12.0 + 4 * size))
    return found


def separate_passes(p: nn.Parameter, widens: bool) -> Callable[[], None]:
    """What a training loop does with torch; `widens`: gradients arrive in bf16."""
    master = nn.Parameter(p.detach().float())
    master.grad = torch.randn_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)

    def step() -> None:
        assert master.grad is not None
        assert p.grad is not None
        if widens:
            master.grad.copy_(p.grad)
        master.grad.mul_(CLIP)
        optimizer.step()
        with torch.no_grad():
            p.copy_(master)

    return step


class Peer:
    """DeepSpeedCPUAdam in a process of its own, one step at a time."""

    def __init__(self, numel: int, threads: int):
        python = os.environ.get("PEERS_PYTHON", str(ROOT / ".peers" / "bin" / "python"))
        self.problem = "" if Path(python).exists() else f"no DeepSpeed: {python} does not exist"
        self._process: subprocess.Popen[str] | None = None
        if not self.problem:
            self._start(python, numel, threads)

    def _start(self, python: str, numel: int, threads: int) -> None:
        home = Path(python).parent.parent
        environment = {
            "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"),
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": str(threads),
        }
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, "-c", PEER_PROGRAM, str(numel), str(threads)],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready"):
                return
        assert self._process.stderr is not None
        words = self._process.stderr.read().strip().splitlines()
        self.problem = f"DeepSpeedCPUAdam does not run: {words[-1] if words else 'it says nothing'}"

    def step(self) -> float:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds"):
                return float(line.split()[1])
        raise RuntimeError("DeepSpeed's process ended in the middle")

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    numel = args.parameters
    source, target = torch.ones(numel), torch.empty(numel)
    copies = Contender("copy_", "copy", timed(lambda: target.copy_(source)), 8.0)
    contenders = [copies, *fp32_contenders(numel), *bf16_contenders(numel)]
    peer = Peer(numel, torch.get_num_threads())
    if peer.problem:
        print(peer.problem)
    else:
        contenders.append(Contender("DeepSpeedCPUAdam", "fp32 parameters", peer.step, 28.0))
    try:
        for number in range(args.warm_up + args.rounds):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                time.sleep(PAUSE_SECONDS)
                seconds = contender.run()
                if number >= args.warm_up:
                    contender.seconds.append(seconds)
            print(f"  round {number + 1} of {args.warm_up + args.rounds}", flush=True)
    finally:
        peer.close()
    rows = [row_of(contender, numel) for contender in contenders]
    bandwidth = rows[0]["gb_per_second"]
    for row in rows:
        row["of_copy_bandwidth"] = round(row["gb_per_second"] / bandwidth, 3)
    return {"rows": rows, "speedups": speedups(contenders), "left_out": peer.problem}


def row_of(contender: Contender, numel: int) -> dict[str, Any]:
    nanoseconds = [seconds / numel * 1e9 for seconds in contender.seconds]
    median = statistics.median(nanoseconds)
    return {
        "group": contender.group,
        "name": contender.name,
        "ns_per_parameter": round(median, 3),
        "fastest": round(min(nanoseconds), 3),
        "slowest": round(max(nanoseconds), 3),
        "bytes_per_parameter": contender.bytes_moved,
        "gb_per_second": round(contender.bytes_moved / median, 3),
    }


def speedups(contenders: list[Contender]) -> dict[str, float]:
    """Medians over the rounds of how many times faster zeepo is, round by round."""
    by_name = {(c.group, c.name): c.seconds for c in contenders}
    narrow = "bf16 parameters, masters, clip"
    pairs = {
        "zeepo fp32 over torch fused": ("fp32 parameters", "torch fused", "zeepo fp32"),
        "zeepo fp32 over DeepSpeedCPUAdam": ("fp32 parameters", "DeepSpeedCPUAdam", "zeepo fp32"),
        "one pass over separate passes": (narrow, "torch, separate passes", "zeepo fp32"),
        "one pass over separate passes, fp32 gradients": (
            narrow, "torch, fp32 gradients", "zeepo fp32",
        ),
    }  # fmt: skip
    found = {}
    for name, (group, theirs, ours) in pairs.items():
        if (group, theirs) in by_name:
            rounds = zip(by_name[group, theirs], by_name[group, ours], strict=True)
            found[name] = round(statistics.median(a / b for a, b in rounds), 3)
    return found


def print_rows(result: dict[str, Any]) -> None:
    print(f"{'':<32}{'':<24}{'ns/param':>9}{'from':>8}{'to':>8}{'GB/s':>8}{'of copy':>9}")
    for row in result["rows"]:
        print(
            f"{row['group']:<32}{row['name']:<24}{row['ns_per_parameter']:>9.2f}"
            f"{row['fastest']:>8.2f}{row['slowest']:>8.2f}{row['gb_per_second']:>8.2f}"
            f"{row['of_copy_bandwidth']:>9.0%}"
        )
    for name, factor in result["speedups"].items():
        print(f"{name}: {factor:.2f}x")


def plot(report: dict[str, Any], path: Path) -> None:
    rows = list(reversed(report["result"]["rows"]))
    figure, axes = reporting.new_plot(height=0.4 * len(rows) + 1.2)
    values = [row["ns_per_parameter"] for row in rows]
    spread = [
        [row["ns_per_parameter"] - row["fastest"] for row in rows],
        [row["slowest"] - row["ns_per_parameter"] for row in rows],
    ]
    colors = ["#2a6f97" if row["name"].startswith("zeepo") else "#b0b0b0" for row in rows]
    axes.barh([f"{row['name']}\n{row['group']}" for row in rows], values, xerr=spread, color=colors)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ns per parameter (median; the line is the spread)")
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    reporting.add_arguments(parser)
    args = parser.parse_args()
    if args.short:
        args.parameters, args.rounds, args.warm_up = 4_000_000, 3, 1
    if args.threads:
        torch.set_num_threads(args.threads)
    reporting.warn_of_load()
    report = reporting.new_report(
        "ns per parameter of an AdamW step",
        parameters=args.parameters,
        rounds=args.rounds,
        threads=torch.get_num_threads(),
        kernels=kernels.level,
        torch=torch.__version__,
    )
    result = measure(args)
    print_rows(result)
    report["result"] = result
    path = reporting.result_path("optimizer_speed", is_short=args.short, given=args.result)
    reporting.write(report, path)
    plot(report, path)


if __name__ == "__main__":
    main()
