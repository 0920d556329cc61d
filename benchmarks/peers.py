"""What does a step cost on one rank, and how much memory, beside PyTorch, FSDP2 and DeepSpeed?

    python benchmarks/peers.py [--disk DIRECTORY] [--models 162M 405M] [--engines ...] [--short]

A GPT of 162M parameters and one of 405M (with activation checkpointing), 2 x 256 tokens. Every
configuration of an engine runs once, then the best of each in turns with the others'; each run is a
process of its own. The figures are the median step (and its spread) and the peak resident memory;
losses are compared with plain PyTorch's. DeepSpeed runs in an environment of its own (`make
peers-env`), with its optimizer in RAM, offloaded to "CPU", and to files (NVMe). An interrupted run
goes on where it stopped: tuning that is in the result is not done again (--fresh: it is).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import reporting
from engine_runs import MB, NUM_WARM_UP, Setting, print_rows, take_turns, tune
from rank_engines import DISK, ONE_RANK, Configuration

MODELS: dict[str, dict[str, Any]] = {
    "162M": {"num_layers": 12},
    "405M": {"num_layers": 24, "width": 1024, "num_heads": 16, "checkpointing": True},
    "tiny": {"num_layers": 2, "width": 128, "num_heads": 2, "vocabulary": 1000, "sequence": 64},
}
SHORT_ENGINES = ["plain", "fsdp2", "deepspeed3", "deepspeed3-nvme", "zeepo", "zeepo-disk"]
QUESTION = "step time and memory on one rank beside PyTorch, FSDP2 and DeepSpeed"


def candidates_of(args: argparse.Namespace) -> dict[str, list[Configuration]]:
    """The engines with what is tried of each; in the short form one configuration."""
    on_disk = {"disk": DISK, "ram": args.ram}
    on_disk |= dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
    name = f"on disk, ram={args.ram}"
    known = {**ONE_RANK, "zeepo-disk": [Configuration("zeepo-disk", name, on_disk, 2)]}
    return {engine: known[engine][: 1 if args.short else None] for engine in args.engines}


def compare(
    args: argparse.Namespace, name: str, report: dict[str, Any], path: Path
) -> dict[str, Any]:
    """One model with every engine; what is known is written after each turn."""
    setting = Setting(
        num_ranks=1,
        model=MODELS[name],
        num_steps=args.steps,
        num_tuning_steps=args.tuning_steps,
        num_turns=args.turns,
        seconds=args.seconds,
        batch=2,
        disk=args.disk,
        reference="plain",
    )
    print(f"{name}: {setting.model}, batch of 2", flush=True)
    found = report["models"].setdefault(name, {})
    tuned = tune(candidates_of(args), setting, found.get("tried"))
    found |= {"model": setting.model, "batch": 2, "tried": tuned.short()}

    def keep(rows: dict[str, Any]) -> None:
        found["rows"] = rows
        reporting.write(report, path)

    keep({})
    rows = take_turns(tuned, setting, keep)
    print_rows(f"{name} on one rank", rows, "plain PyTorch")
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Time and memory of each engine side by side, for each model."""
    models = {name: found for name, found in report["models"].items() if found.get("rows")}
    figure, axes = reporting.new_plot(9.0 * len(models), 4.2, 2 * len(models))
    for index, (name, found) in enumerate(models.items()):
        rows = found["rows"]
        colors = ["tab:orange" if engine.startswith("zeepo") else "tab:blue" for engine in rows]
        seconds = [row["seconds_per_step"] for row in rows.values()]
        spreads = [row["seconds_of_turns"] for row in rows.values()]
        errors = [
            [middle - min(spread) for middle, spread in zip(seconds, spreads, strict=True)],
            [max(spread) - middle for middle, spread in zip(seconds, spreads, strict=True)],
        ]
        peaks = [row["peak_bytes"] / MB / 1000 for row in rows.values()]
        time_axis, memory_axis = axes[2 * index : 2 * index + 2]
        bars = time_axis.barh(list(rows), seconds, xerr=errors, color=colors, capsize=3)
        time_axis.bar_label(bars, [f"{value:.2f}" for value in seconds], padding=6, fontsize=8)
        bars = memory_axis.barh(list(rows), peaks, color=colors)
        memory_axis.bar_label(bars, [f"{value:.2f}" for value in peaks], padding=3, fontsize=8)
        time_axis.set_xlabel("seconds a step (median, range of the turns)")
        memory_axis.set_xlabel("peak resident memory, GB")
        time_axis.set_title(f"{name}, 2 x {found['model'].get('sequence', 256)} tokens")
        for axis in (time_axis, memory_axis):
            axis.invert_yaxis()
            axis.margins(x=0.15)
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["162M", "405M"])
    parser.add_argument("--engines", nargs="*", choices=list(ONE_RANK))
    parser.add_argument("--disk", help="for what zeepo and DeepSpeed have on disk")
    parser.add_argument("--ram", help="of zeepo on disk", default="1.5GiB")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--steps", type=int, help=f"of a run, the first {NUM_WARM_UP} uncounted")
    parser.add_argument("--tuning-steps", type=int)
    parser.add_argument("--seconds", type=float, default=900.0, help="for one run")
    parser.add_argument("--fresh", action="store_true", help="forget what was tuned before")
    reporting.add_arguments(parser)
    args = parser.parse_args()
    args.engines = args.engines or (SHORT_ENGINES if args.short else list(ONE_RANK))
    args.turns = args.turns or (1 if args.short else 5)
    args.steps = args.steps or (3 if args.short else 7)
    args.tuning_steps = args.tuning_steps or (3 if args.short else 4)
    args.models = ["tiny"] if args.short else args.models
    reporting.warn_of_load()
    path = reporting.result_path("peers", is_short=args.short, given=args.result)
    report = reporting.new_report(QUESTION, num_warm_up=NUM_WARM_UP, models={})
    if path.exists() and not args.fresh and not args.short:
        report["models"] = json.loads(path.read_text())["models"]
    for name in args.models:
        compare(args, name, report, path)
    draw(report, path)


if __name__ == "__main__":
    main()
