"""Do small optimizer states train as well? Loss curves of fp32, bf16 and 8-bit states.

A small GPT learns this repository's own text, byte by byte, from the same values on the same
batches, once with each way of keeping AdamW's states. Writes a JSON and a plot under
benchmarks/results.

    python benchmarks/state_curves.py [--steps 400]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import reporting
import torch
from gpt import GPT, GPTConfig

import zeepo
from zeepo.optim import kernels

ROOT = Path(__file__).parent.parent
FORMATS = ("fp32", "bf16", "8bit")
CONFIG = GPTConfig(num_layers=4, width=128, num_heads=4, vocabulary=256, sequence=64)
BATCH = 16
WINDOW = 20
"""Steps over which a curve is averaged."""


def text_of_repository() -> torch.Tensor:
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")]
    text = b"".join(path.read_bytes() for path in sorted(paths))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def curve(state_dtype: str, text: torch.Tensor, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = zeepo.optim.AdamW(model.parameters(), lr=1e-3, state_dtype=state_dtype)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - CONFIG.sequence - 1, (BATCH,), generator=generator)
        batch = torch.stack([text[at : at + CONFIG.sequence + 1] for at in starts])
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.clip_factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = statistics.mean(losses[-WINDOW:])
            print(f"  {state_dtype:>5} step {step + 1}: {mean:.4f}", flush=True)
    return losses


def smooth(losses: list[float]) -> list[float]:
    """Means over the last steps."""
    return [statistics.mean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))]


def compare(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How far each curve is from fp32's, once both are smooth."""
    expected = smooth(curves["fp32"])
    found = {}
    for name, losses in curves.items():
        pairs = list(zip(smooth(losses), expected, strict=True))[WINDOW:]
        found[name] = {
            "final": round(pairs[-1][0], 4),
            "final_difference": round(pairs[-1][0] - pairs[-1][1], 4),
            "largest_difference": round(max(abs(a - b) for a, b in pairs), 4),
        }
    return found


def plot(curves: dict[str, list[float]], report: dict[str, Any], path: Path) -> None:
    """The curves, which lie on each other, and how far each is from fp32's."""
    figure, (left, right) = reporting.new_plot(width=10, height=4, columns=2)
    expected = smooth(curves["fp32"])
    for name, losses in curves.items():
        left.plot(smooth(losses), label=f"{name} states", linewidth=1.2)
        if name != "fp32":
            differences = [a - b for a, b in zip(smooth(losses), expected, strict=True)]
            right.plot(differences, label=f"{name} states", linewidth=1.2)
    left.set_ylabel(f"loss, mean of {WINDOW} steps")
    right.set_ylabel("difference from fp32 states")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend()
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    reporting.add_arguments(parser)
    args = parser.parse_args()
    text = text_of_repository()
    report = reporting.new_report(
        "loss curves of a small GPT with fp32, bf16 and 8-bit optimizer states",
        model=vars(CONFIG),
        batch=BATCH,
        text_bytes=len(text),
        kernels=kernels.level,
        torch=torch.__version__,
    )
    curves = {name: curve(name, text, 30 if args.short else args.steps) for name in FORMATS}
    report["compared"] = compare(curves)
    for name, figures in report["compared"].items():
        print(f"{name:>5}: {figures}")
    report["losses"] = {name: [round(x, 4) for x in losses] for name, losses in curves.items()}
    path = reporting.result_path("state_curves", is_short=args.short, given=args.result)
    reporting.write(report, path)
    plot(curves, report, path)


if __name__ == "__main__":
    main()
