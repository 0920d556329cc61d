"""Does a GPT train whose training state is larger than this machine's memory, and how fast?

    python benchmarks/beyond_memory.py --disk DIRECTORY [--ram 3GiB] [--steps 6] [--peers] [--short]

A GPT of 1.4 billion parameters, 512 tokens a step, blocks recomputed in backward, everything on
disk. Its compute alone is measured on its layers in memory, in a process of its own, which has its
turn after every step: one block (forward, recomputed forward, backward, fused AdamW) times their
number, and embedding, head and loss. Each step is held against the mean of the two measurements
around it, and the figure is the median over steps; exposed time is what a step takes beyond its
largest part alone, as in practicality.py. With --peers plain PyTorch, FSDP2 and DeepSpeed try
to take two steps, each in a memory cgroup: once with as much as zeepo's `ram`, once with all the
memory there is; without it what became of them before stays in the result, with its date.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import reporting
import torch
from children import Child, serve
from gpt import GPT, Block, GPTConfig
from largest_model import attempt
from practicality import WAYS, DiskProcess, exposed, link_speeds, per_step
from rank_engines import ONE_RANK
from torch.utils.checkpoint import checkpoint

import zeepo
from zeepo.planner.machine import machine_available_bytes, peak_resident_growth_bytes
from zeepo.units import parse_bytes

LARGE = GPTConfig(num_layers=24, width=2048, num_heads=16, sequence=512, checkpointing=True)
SHORT = GPTConfig(num_layers=4, width=256, num_heads=4, sequence=64, checkpointing=True)
GOAL = 1.25
NUM_WARM_UP = 2
"""Steps: the first makes the states, the second has no forecast of its own yet."""
NUM_TIMES = 2
"""That each layer is measured in a turn."""
LEFT_TO_SYSTEM_BYTES = 1 << 30
SAME, ALL = "peers given the same", "peers given all memory"


@dataclass(frozen=True)
class Model:
    """What `attempt` wants to know of a model."""

    config: GPTConfig

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.config)

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in GPT(self.config).parameters())


# -- compute alone ---------------------------------------------------------------------------------


def _serve_layers(pipe: Connection, config: GPTConfig) -> None:
    """The process of the layers in memory: one measurement for each message."""
    torch.manual_seed(0)
    block = Block(config)
    x = torch.randn(1, config.sequence, config.width, requires_grad=True)
    block_optimizer = torch.optim.AdamW(block.parameters(), lr=3e-4, fused=True)

    def train_block() -> None:
        checkpoint(block, x, use_reentrant=False).sum().backward()
        block_optimizer.step()
        block_optimizer.zero_grad()

    without = GPT(GPTConfig(**{**asdict(config), "num_layers": 0}))
    optimizer = torch.optim.AdamW(without.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(config.vocabulary, (1, config.sequence + 1))

    def train_ends() -> None:
        without(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measure(num_times: int) -> dict[str, float]:
        block_seconds = _median(train_block, num_times)
        ends_seconds = _median(train_ends, num_times)
        return {
            "block": block_seconds,
            "embedding, head and loss": ends_seconds,
            "step": config.num_layers * block_seconds + ends_seconds,
        }

    pipe.send("ready")
    serve(pipe, measure)


def _median(run: Callable[[], None], num_times: int) -> float:
    """The first time does not count: it meets what the other process left behind."""
    found = []
    for _ in range(num_times + 1):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


# -- zeepo -----------------------------------------------------------------------------------------


def _serve_steps(pipe: Connection, config: GPTConfig, ram: str, disk: str) -> None:
    """The process that builds and trains inside `ram`: a step for each message."""
    torch.manual_seed(0)
    started = time.perf_counter()
    with zeepo.lazy(ram=ram, disk=disk):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    with zeepo.init(model, optimizer, disk=disk, **{**WAYS["backward"], "ram": ram}) as session:
        build_seconds = time.perf_counter() - started

        def step(_: object) -> dict[str, float]:
            tokens = torch.randint(config.vocabulary, (1, config.sequence + 1), generator=generator)
            before, started = session.stats(), time.perf_counter()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            moved = per_step(before, session.stats(), 1)
            return {"seconds": seconds, "loss": loss.item(), **moved}

        pipe.send({"minimum_ram": session.plan.minimum_ram, "build_seconds": build_seconds})
        serve(pipe, step)
        pipe.send({"peak_growth_bytes": peak_resident_growth_bytes()})


def take_turns(config: GPTConfig, ram: str, disk: str, num_steps: int) -> dict[str, Any]:
    """A measurement of the layers before the first step and after each, and of the disk alone."""
    layers, link = Child(_serve_layers, config), DiskProcess(disk)
    training = Child(_serve_steps, config, ram, disk)
    alone = [layers.ask(NUM_TIMES)]
    steps: list[dict[str, float]] = []
    for number in range(num_steps):
        steps.append(training.ask("step"))
        steps[-1]["disk_alone_seconds"] = link.seconds_to_move(steps[-1])
        alone.append(layers.ask(NUM_TIMES))
        print(
            f"  step {number}: {steps[-1]['seconds']:.2f} s, loss {steps[-1]['loss']:.4f}, "
            f"compute alone {alone[-1]['step']:.2f} s, "
            f"disk alone {steps[-1]['disk_alone_seconds']:.2f} s",
            flush=True,
        )
    found = training.first | training.close()
    layers.close()
    link.close()
    print(f"  most that the process grew: {found['peak_growth_bytes'] / 2**30:.2f} GiB")
    return {**found, "steps": steps, "compute_alone": alone}


# -- peers -----------------------------------------------------------------------------------------


def try_peers(model: Model, disk: str, report: dict[str, Any], path: Path) -> None:
    """Whether others can start, given zeepo's `ram`, and given all the memory there is; written as
    it is found, and what is known already is not tried again."""
    everything = (machine_available_bytes() or 0) - LEFT_TO_SYSTEM_BYTES
    for key, given_bytes in ((SAME, parse_bytes(report["ram"])), (ALL, everything)):
        found = report.setdefault(key, {})
        for engine in ("plain", "fsdp2", "deepspeed3-cpu", "deepspeed3-nvme"):
            for configuration in ONE_RANK[engine]:
                if configuration.label in found:
                    continue
                facts = attempt(configuration, model, given_bytes, disk, 1200.0)  # type: ignore[arg-type]
                found[configuration.label] = facts
                reporting.write(report, path)
                print(_told(key, configuration.label, facts), flush=True)


def _told(key: str, label: str, facts: Mapping[str, Any]) -> str:
    seconds = facts.get("step_seconds")
    pace = f", {seconds[-1]:.1f} s a step" if seconds else ""
    peak = f"at most {facts['peak_bytes'] / 2**30:.1f} GiB"
    return f"{key}: {label}: {facts['outcome']} ({peak}{pace})"


# -- the figure ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    reporting.add_arguments(parser)
    parser.add_argument("--disk")
    parser.add_argument("--ram", default="3GiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only-peers", action="store_true", help="and keep what was measured")
    args = parser.parse_args()
    reporting.warn_of_load()
    config, ram = (SHORT, "512MiB") if args.short else (LARGE, args.ram)
    model = Model(config)
    report = reporting.new_report(
        "a step of a model larger than memory / its compute alone",
        model=asdict(config),
        parameters=model.num_parameters,
        ram=ram,
    )
    path = reporting.result_path("beyond_memory", is_short=args.short, given=args.result)
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        if args.only_peers:
            report = json.loads(path.read_text())
        else:
            if path.exists() and not args.peers:
                report |= kept_tries(json.loads(path.read_text()), report)
            _measure(report, config, disk, args.steps)
            reporting.write(report, path)
        if args.peers or args.only_peers:
            try_peers(model, disk, report, path)
    _show(report, path)


def kept_tries(kept: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """What became of the peers before, each with its date, if it was the same they tried."""
    if any(kept[key] != report[key] for key in ("model", "ram")):
        return {}
    return {
        key: {label: {"date": kept["date"], **facts} for label, facts in kept[key].items()}
        for key in (SAME, ALL)
        if key in kept
    }


def _measure(report: dict[str, Any], config: GPTConfig, disk: str, num_steps: int) -> None:
    report["link_bytes_per_second"] = speeds = link_speeds(Path(disk), 1 << 30)
    report |= take_turns(config, report["ram"], disk, num_steps)
    report |= _figures(report, speeds)


def _figures(report: Mapping[str, Any], speeds: Mapping[str, float]) -> dict[str, Any]:
    """Medians over the steps that count; each has the compute measured around it beside it."""
    counted = report["steps"][NUM_WARM_UP:]
    around = pairwise(alone["step"] for alone in report["compute_alone"][NUM_WARM_UP:])
    pairs = [
        (statistics.mean(both), step["seconds"]) for both, step in zip(around, counted, strict=True)
    ]
    ratios = [seconds / compute for compute, seconds in pairs]
    per_step = {
        key: statistics.median(step[key] for step in counted)
        for key in ("disk->ram", "ram->disk", "seconds_waited")
    }
    return {
        "seconds_per_step": statistics.median(seconds for _, seconds in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "per_step": per_step,
        **exposed(pairs, per_step, speeds, [step["disk_alone_seconds"] for step in counted]),
    }


def _show(report: Mapping[str, Any], path: Path) -> None:
    counted = [step["seconds"] for step in report["steps"][NUM_WARM_UP:]]
    row = (
        f"{report['parameters'] / 1e6:.0f}M",
        report["ram"],
        f"{report['peak_growth_bytes'] / 2**30:.2f} GiB",
        reporting.median_and_spread(counted),
        f"{report['compute_alone_seconds']:.2f}",
        reporting.median_and_spread(report["ratios"], 3),
        f"{report['per_step']['disk->ram'] / 1e9:.2f}",
        f"{report['per_step']['ram->disk'] / 1e9:.2f}",
        reporting.median_and_spread([100 * share for share in report["exposed_shares"]], 1),
        f"{100 * report['exposed_by_direction_share']:.1f}",
    )
    heads = (
        "parameters", "ram", "grew by", "s/step", "compute alone, s", "ratio", "GB read",
        "GB written", "exposed, %", "by direction, %",
    )  # fmt: skip
    reporting.print_table(str(report["question"]), heads, [row])
    for key in (SAME, ALL):
        for label, facts in report.get(key, {}).items():
            print(_told(key, label, facts))
    _plot(report, path)


def _plot(report: Mapping[str, Any], path: Path) -> None:
    figure, axes = reporting.new_plot()
    seconds = [step["seconds"] for step in report["steps"]]
    axes.bar(range(1, len(seconds) + 1), seconds, label="zeepo")
    for factor, style, what in ((1.0, "-", "compute alone"), (GOAL, "--", f"x {GOAL}")):
        line = factor * report["compute_alone_seconds"]
        axes.axhline(line, color="black", linestyle=style, linewidth=0.9, label=what)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_title(f"{report['parameters'] / 1e9:.1f} billion parameters in {report['ram']}")
    axes.legend(frameon=False)
    reporting.save_plot(figure, report, path)


if __name__ == "__main__":
    main()
