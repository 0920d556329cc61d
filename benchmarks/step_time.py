"""What does a step cost under zeepo? Against plain PyTorch with fused AdamW, in one process.

Plain and zeepo train on the same batches in turns of four steps. The first step of a turn does not
count: it meets what the other left behind (transfers under way, the allocator's free lists, cold
caches), and so every counted zeepo step does the whole of one update, its own or the one before.
The figure is the median over turns of the ratio of both, without the first turn. Losses must be
equal bit for bit. Writes a JSON under benchmarks/results.

    python benchmarks/step_time.py --disk DIRECTORY [--ram 1GiB] [--layers 12 ...] [--short]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting
import torch
from gpt import GPT, GPTConfig

import zeepo


@dataclass(frozen=True)
class Turns:
    """How plain and zeepo take turns."""

    num_turns: int
    num_steps: int
    num_skipped: int
    """Steps at the beginning of a turn that do not count."""
    num_warm_up: int
    """Turns that do not count."""

    def seconds(self, trainer: Trainer, turn: int) -> float:
        """Of a step: the median of a turn's counted steps."""
        first = turn * self.num_steps
        return statistics.median(trainer.seconds[first + self.num_skipped : first + self.num_steps])


TURNS = Turns(num_turns=8, num_steps=4, num_skipped=1, num_warm_up=1)
SHORT_TURNS = Turns(num_turns=2, num_steps=2, num_skipped=1, num_warm_up=0)
SHORT_MODEL = GPTConfig(num_layers=4, width=256, num_heads=4, vocabulary=4096, sequence=64)


class Trainer:
    """One model with its optimizer, trained step by step."""

    def __init__(self, config: GPTConfig):
        torch.manual_seed(0)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        started = time.perf_counter()
        loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)


def compare(config: GPTConfig, batch: int, turns: Turns, **options: Any) -> dict[str, Any]:
    """Train plainly and under zeepo in turns."""
    plain, managed = Trainer(config), Trainer(config)
    session = zeepo.init(managed.model, managed.optimizer, **options)
    generator = torch.Generator().manual_seed(1)
    for number in range(turns.num_turns):
        shape = (turns.num_steps, batch, config.sequence + 1)
        batches = torch.randint(config.vocabulary, shape, generator=generator)
        for trainer in (plain, managed) if number % 2 else (managed, plain):
            for tokens in batches:
                trainer.step(tokens)
        print(
            f"  turn {number}: plain {turns.seconds(plain, number):6.2f} s  "
            f"zeepo {turns.seconds(managed, number):6.2f} s  loss {managed.losses[-1]:.6f}"
            f"  {'=' if plain.losses == managed.losses else 'DIFFERS'}",
            flush=True,
        )
    stats = dict(session.stats())
    plan = session.plan
    session.close()
    counted = range(turns.num_warm_up, turns.num_turns)
    pairs = [(turns.seconds(plain, turn), turns.seconds(managed, turn)) for turn in counted]
    return {
        "options": {key: str(value) for key, value in options.items() if key != "disk"},
        "plain_seconds": plain.seconds,
        "zeepo_seconds": managed.seconds,
        "plain_median": statistics.median(a for a, _ in pairs),
        "zeepo_median": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratios": [round(b / a, 3) for a, b in pairs],
        "turns": turns.__dict__,
        "losses_bit_equal": plain.losses == managed.losses,
        "minimum_ram": plan.minimum_ram,
        "stats": stats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", default=None)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--ram", default="1GiB", help="budget of the run on disk")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", choices=("ram", "disk"), default=None)
    reporting.add_arguments(parser)
    args = parser.parse_args()
    config = SHORT_MODEL if args.short else GPTConfig(num_layers=args.layers)
    turns = SHORT_TURNS if args.short else TURNS
    everything = {"params": "ram", "grads": "ram", "optimizer_state": "ram"}
    on_disk = dict.fromkeys(everything, "disk")
    reporting.warn_of_load()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        if args.only != "disk":
            print("everything in RAM")
            results["ram"] = compare(config, args.batch, turns, **everything)
        if args.only != "ram":
            print(f"everything on disk, ram={args.ram}")
            results["disk"] = compare(config, args.batch, turns, ram=args.ram, disk=disk, **on_disk)
    report = reporting.new_report(
        "step time of a GPT against plain PyTorch with fused AdamW",
        model=vars(config),
        batch=args.batch,
        torch=torch.__version__,
        results=results,
    )
    rows = [
        [name, *(f"{r[key]:.3f}" for key in ("plain_median", "zeepo_median", "ratio")), equal]
        for name, r in results.items()
        for equal in ["same bits" if r["losses_bit_equal"] else "DIFFERENT"]
    ]
    heads = ["where", "plain, s/step", "zeepo, s/step", "ratio", "losses"]
    reporting.print_table("a step under zeepo beside plain PyTorch", heads, rows)
    path = reporting.result_path("step_time", is_short=args.short, given=args.result)
    reporting.write(report, path)
    draw(report, path)


def draw(report: dict[str, Any], path: Path) -> None:
    """The ratio of each turn."""
    figure, axis = reporting.new_plot(6.0, 4.0)
    for name, result in report["results"].items():
        label = f"{name}: {result['ratio']:.2f}"
        axis.plot(range(1, 1 + len(result["ratios"])), result["ratios"], "o-", label=label)
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("turn")
    axis.set_ylabel("zeepo / plain PyTorch, seconds a step")
    axis.set_title("Step time under zeepo, beside plain PyTorch")
    axis.legend(title="state rests on, median", frameon=False, loc="lower right")
    reporting.save_plot(figure, report, path)


if __name__ == "__main__":
    main()
