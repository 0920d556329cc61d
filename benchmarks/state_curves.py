"""Do small optimizer states train as well, and what do they save on disk?

    python benchmarks/state_curves.py --disk DIRECTORY [--steps 400] [--demo-steps 40] [--short]

Once with each way of keeping AdamW's states, fp32, bf16 and 8-bit, from the same values on the same
batches:

- README's demo (160M parameters, the standard library's sources) under zeepo, everything on disk
  and the demo's `ram`; what its states moved to and from disk is counted at the disk tier,
- a small GPT in plain memory for many steps, on this repository's own text, byte by byte.

Writes a JSON and a plot under benchmarks/results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reporting
import torch
from bytes_moved import EDGES, ON_DISK, counted_by_kind
from gpt import GPT, GPTConfig

import zeepo
from zeepo.optim import kernels

sys.path.append(str(reporting.ROOT))  # the demo lies beside the benchmarks

from examples.demo.__main__ import FULL, SMALL
from examples.demo.text import Tokenizer, standard_library

FORMATS = ("fp32", "bf16", "8bit")
CONFIG = GPTConfig(num_layers=4, width=128, num_heads=4, vocabulary=256, sequence=64)
BATCH = 16
WINDOW = 20
"""Steps over which a curve is averaged."""
DEMO_RAM = "663MiB"
"""A quarter of what the demo grows by in plain PyTorch, which is what README gives it."""
NUM_WARM_UP = 3
"""Steps whose bytes do not count: the states are made, and no forecast is there."""
NUM_TOLD = 10
"""A line after so many steps."""


def text_of_repository() -> torch.Tensor:
    root = reporting.ROOT
    paths = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("src/**/*.py")]
    text = b"".join(path.read_bytes() for path in sorted(paths))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def text_of_demo(settings: dict[str, Any]) -> torch.Tensor:
    text = standard_library()[: settings["text_bytes"]]
    return torch.from_numpy(Tokenizer.of(text, settings["vocabulary"]).encode(text)).long()


def batches(text: torch.Tensor, num: int, size: int, sequence: int) -> Iterator[torch.Tensor]:
    """The same ones for every format."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        starts = torch.randint(len(text) - sequence - 1, (size,), generator=generator)
        yield torch.stack([text[at : at + sequence + 1] for at in starts])


def tell(state_dtype: str, losses: list[float]) -> None:
    if len(losses) % NUM_TOLD == 0:
        mean = statistics.mean(losses[-WINDOW:])
        print(f"  {state_dtype:>5} step {len(losses)}: {mean:.4f}", flush=True)


def small_curve(state_dtype: str, text: torch.Tensor, steps: int) -> list[float]:
    """Of a small GPT, with a schedule and clipping."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = zeepo.optim.AdamW(model.parameters(), lr=1e-3, state_dtype=state_dtype)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses: list[float] = []
    for batch in batches(text, steps, BATCH, CONFIG.sequence):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.clip_factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        tell(state_dtype, losses)
    return losses


def demo_curve(
    state_dtype: str, text: torch.Tensor, steps: int, settings: dict[str, Any], disk: str | None
) -> dict[str, Any]:
    """Of the demo under zeepo: losses, the size of its states, and what they moved in a step."""
    torch.manual_seed(0)
    config = GPTConfig(
        settings["layers"], settings["width"], settings["heads"], settings["vocabulary"],
        settings["sequence"], checkpointing=True,
    )  # fmt: skip
    ram = settings["ram"] or DEMO_RAM
    losses: list[float] = []
    moved: list[int] = []
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        with zeepo.lazy(ram=ram, disk=folder):
            model = GPT(config)
        optimizer = zeepo.optim.AdamW(
            model.parameters(), lr=settings["lr"], state_dtype=state_dtype
        )
        with zeepo.init(model, optimizer, ram=ram, disk=folder, **ON_DISK):
            for batch in batches(text, steps, settings["batch"], config.sequence):
                with counted_by_kind() as by_kind:
                    loss = model(batch[:, :-1], batch[:, 1:])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                moved.append(sum(by_kind[edge, "states"] for edge in EDGES.values()))
                tell(state_dtype, losses)
            parameters = sum(p.numel() for p in model.parameters())
            states = [state for p in model.parameters() for state in optimizer.state[p].values()]
            nbytes = sum(s.numel() * s.element_size() for s in states if s.dim())
    return {
        "losses": losses,
        "states_bytes": nbytes,
        "bytes_per_parameter": round(nbytes / parameters, 2),
        "states_moved_per_step": int(statistics.median(moved[NUM_WARM_UP:])),
    }


def smooth(losses: list[float]) -> list[float]:
    """Means over the last steps."""
    return [statistics.mean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))]


def compare(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How far each curve is from fp32's, once both are smooth."""
    expected = smooth(curves["fp32"])
    found = {}
    for name, losses in curves.items():
        pairs = list(zip(smooth(losses), expected, strict=True))
        found[name] = {
            "final": round(pairs[-1][0], 4),
            "final_difference": round(pairs[-1][0] - pairs[-1][1], 4),
            "largest_difference": round(max(abs(a - b) for a, b in pairs[WINDOW:]), 4),
        }
    return found


def run_small(steps: int) -> dict[str, Any]:
    text = text_of_repository()
    curves = {name: small_curve(name, text, steps) for name in FORMATS}
    facts = {"model": vars(CONFIG), "batch": BATCH, "text_bytes": len(text)}
    return facts | {"compared": compare(curves), "losses": rounded(curves)}


def run_demo(steps: int, settings: dict[str, Any], disk: str | None) -> dict[str, Any]:
    text = text_of_demo(settings)
    runs = {name: demo_curve(name, text, steps, settings, disk) for name in FORMATS}
    curves = {name: run.pop("losses") for name, run in runs.items()}
    fp32 = runs["fp32"]
    for run in runs.values():
        for key in ("states_bytes", "states_moved_per_step"):
            run[f"fp32_{key}_ratio"] = round(fp32[key] / run[key], 2) if run[key] else None
    facts = {"settings": settings | {"steps": steps}, "states": runs}
    return facts | {"compared": compare(curves), "losses": rounded(curves)}


def rounded(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(x, 4) for x in losses] for name, losses in curves.items()}


def print_report(report: dict[str, Any]) -> None:
    rows = []
    for part in ("demo", "small"):
        for name, found in report[part]["compared"].items():
            states = report[part].get("states", {}).get(name, {})
            moved = states.get("states_moved_per_step")
            told = "" if moved is None else f"{moved / 1e6:.0f}"
            ratio = states.get("fp32_states_moved_per_step_ratio") or ""
            differences = (found["final_difference"], found["largest_difference"])
            each = states.get("bytes_per_parameter", "")
            rows.append([part, name, found["final"], *differences, each, told, ratio])
    heads = [
        "model", "states", "loss at the end", "less fp32's", "at most off", "bytes / parameter",
        "MB of states moved a step", "fp32's / these",
    ]  # fmt: skip
    reporting.print_table(report["question"], heads, rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Of both models the curves, which lie on each other, and how far each is from fp32's."""
    figure, axes = reporting.new_plot(width=15, height=4, columns=4)
    for part, (left, right) in (("demo", axes[:2]), ("small", axes[2:])):
        curves = report[part]["losses"]
        expected = smooth(curves["fp32"])
        for name, losses in curves.items():
            color = f"C{FORMATS.index(name)}"
            left.plot(smooth(losses), label=f"{name} states", linewidth=1.2, color=color)
            if name != "fp32":
                differences = [a - b for a, b in zip(smooth(losses), expected, strict=True)]
                right.plot(differences, linewidth=1.2, color=color)
        left.set_title(f"{part}: loss, mean of {WINDOW}", fontsize=9)
        right.set_title(f"{part}: less that of fp32", fontsize=9)
        for axis in (left, right):
            axis.set_xlabel("step")
        left.legend(frameon=False, fontsize=8)
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", help="for the demo's training state")
    parser.add_argument("--steps", type=int, help="of the small model")
    parser.add_argument("--demo-steps", type=int)
    reporting.add_arguments(parser)
    args = parser.parse_args()
    steps = args.steps or (30 if args.short else 400)
    demo_steps = args.demo_steps or (WINDOW + 2 if args.short else 40)
    report = reporting.new_report(
        "loss of a GPT with fp32, bf16 and 8-bit optimizer states",
        kernels=kernels.level,
        torch=torch.__version__,
    )
    path = reporting.result_path("state_curves", is_short=args.short, given=args.result)
    settings = SMALL if args.short else FULL
    report["demo"] = run_demo(demo_steps, settings, args.disk)
    reporting.write(report, path)
    report["small"] = run_small(steps)
    reporting.write(report, path)
    print_report(report)
    plot(report, path)


if __name__ == "__main__":
    main()
