"""How many bytes does a step move between RAM and disk, beside what it has to?

    python benchmarks/bytes_moved.py --disk DIRECTORY [--factors 1 1.5 2] [--short]

A GPT with everything on disk and the least `ram` that its plan accepts (and multiples of it), so
that next to nothing stays. P, G and S are the bytes of parameters, gradients and optimizer state. A
step whose update is put off reads each parameter for its update and forward, and again for
backward; its states and its gradient for the update; it writes what the update changed (P and S)
and the gradient that backward made:

    read 2P + S + G      written P + S + G

A GPT needs less: its embeddings are not used in backward, its head is used last in forward and
first in backward, and the gradient of its tokens is made last in backward and used first in the
next forward. The formula with these three is this model's; the third was added after a first
measurement showed it, so agreement there confirms nothing. Where ram is larger than the least, more
stays where the direction turns (parameters at the end of forward, gradients at its beginning), and
less should move. Bytes are the differences of `session.stats()["bytes_moved"]` from step to step,
and are counted by kind at the disk tier beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import reporting
import torch
from gpt import GPT, GPTConfig

import zeepo
from zeepo.memory.disk_tier import DiskTier

MB = 1e6
EDGES = {"disk->ram": "read", "ram->disk": "written"}
ON_DISK = dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
NUM_WARM_UP = 3
"""The first step makes the states, the second has no forecast, the third the first whole one."""
TINY = GPTConfig(
    num_layers=12, width=256, num_heads=4, vocabulary=4096, sequence=64, checkpointing=True
)
MODELS = {
    "even units": GPTConfig(num_layers=24, vocabulary=8192, sequence=64, checkpointing=True),
    "162M": GPTConfig(sequence=64, checkpointing=True),
}
"""Whose largest unit is a block; and one whose head and tokens are four times as large as one."""
NOT_IN_BACKWARD = ("tokens", "positions")
"""The embeddings, whose backward needs the indices only."""


def formula(model: GPT, num_states: int = 2) -> dict[str, dict[str, int]]:
    """Bytes of a step if nothing stays: of the plain formula, and of this model."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    params = grads = sum(sizes.values())
    states = num_states * params
    embeddings = sum(n for name, n in sizes.items() if name.split(".")[0] in NOT_IN_BACKWARD)
    general = {
        "params read": 2 * params, "grads read": grads, "states read": states,
        "params written": params, "grads written": grads, "states written": states,
    }  # fmt: skip
    own = dict(general)
    own["params read"] -= embeddings + sizes["head.weight"]
    own["grads read"] -= sizes["tokens.weight"]
    own["grads written"] -= sizes["tokens.weight"]
    return {"general": with_sums(general), "this model": with_sums(own)}


def with_sums(by_kind: dict[str, int]) -> dict[str, int]:
    """And what is read and written of all kinds."""
    return by_kind | {
        edge: sum(n for kind, n in by_kind.items() if kind.endswith(f" {edge}"))
        for edge in EDGES.values()
    }


@contextmanager
def counted_by_kind() -> Iterator[Counter[tuple[str, str]]]:
    """Bytes given to the disk tier, by edge and kind of chunk: `Counter[("read", "params")]`."""
    found: Counter[tuple[str, str]] = Counter()
    read, write = DiskTier.read, DiskTier.write

    def counting_read(self: DiskTier, extent: Any, target: Any) -> Any:
        found["read", kind_of(extent.label)] += extent.nbytes
        return read(self, extent, target)

    def counting_write(self: DiskTier, extent: Any, pieces: Any) -> Any:
        found["written", kind_of(extent.label)] += extent.nbytes
        return write(self, extent, pieces)

    DiskTier.read, DiskTier.write = counting_read, counting_write  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DiskTier.read, DiskTier.write = read, write  # type: ignore[method-assign]


def kind_of(label: str) -> str:
    """Of a chunk, by the name the store gives it."""
    if label.endswith(".grad"):
        return "grads"
    return "states" if ".optimizer." in label else "params"


def train(config: GPTConfig, num_steps: int, ram: int | str, disk: str) -> dict[str, Any]:
    """Bytes of each step by edge and kind."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    facts: dict[str, Any] = {"steps": [], "formula": formula(model), "ram": ram}
    generator = torch.Generator().manual_seed(1)
    with zeepo.init(model, optimizer, ram=ram, disk=disk, **ON_DISK) as session:
        moved = dict.fromkeys(EDGES, 0)
        for _ in range(num_steps):
            shape = (1, config.sequence + 1)
            tokens = torch.randint(config.vocabulary, shape, generator=generator)
            with counted_by_kind() as by_kind:
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = session.stats()
            before, moved = moved, stats["bytes_moved"]
            step = {name: moved[edge] - before[edge] for edge, name in EDGES.items()}
            facts["steps"].append(step | {f"{kind} {e}": n for (e, kind), n in by_kind.items()})
        facts["minimum_ram"] = session.plan.minimum_ram
        facts["activations_spilled"] = stats["activations_spilled"]
    return facts


def measure(name: str, config: GPTConfig, args: argparse.Namespace, disk: str) -> dict[str, Any]:
    """One model at multiples of its least ram: the median of the steps that count."""
    least = train(config, 1, "16GiB", disk)["minimum_ram"]
    found: dict[str, Any] = {"model": vars(config), "minimum_ram": least, "runs": {}}
    rows = []
    for factor in args.factors:
        facts = train(config, args.steps, int(factor * least), disk)
        counted = facts["steps"][NUM_WARM_UP:]
        keys = facts["formula"]["general"]
        medians = {key: int(statistics.median(s.get(key, 0) for s in counted)) for key in keys}
        ratios = {
            which: {key: round(medians[key] / expected, 3) for key, expected in wanted.items()}
            for which, wanted in facts["formula"].items()
        }
        found["runs"][f"{factor:g}"] = facts | {"medians": medians, "ratios": ratios}
        rows += _rows(factor, medians, ratios, facts["formula"])
    heads = ["x least ram", "", "MB a step", "formula, MB", "of it", "this model's, MB", "of it"]
    title = f"{name}: bytes moved in a step, least ram {least / MB:.0f} MB"
    reporting.print_table(title, heads, rows)
    return found


def _rows(
    factor: float,
    medians: dict[str, int],
    ratios: dict[str, dict[str, float]],
    wanted: dict[str, dict[str, int]],
) -> list[list[str]]:
    rows = []
    for key, nbytes in medians.items():
        row = [f"{factor:g}", key, f"{nbytes / MB:.1f}"]
        for which in ("general", "this model"):
            row += [f"{wanted[which][key] / MB:.1f}", f"{ratios[which][key]:.3f}"]
        rows.append(row)
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """The share of the formula that is moved, by ram."""
    figure, axes = reporting.new_plot(5.5 * len(report["models"]), 4.2, len(report["models"]))
    axes = axes if len(report["models"]) > 1 else [axes]
    for axis, (name, found) in zip(axes, report["models"].items(), strict=True):
        factors = [float(factor) for factor in found["runs"]]
        for edge, color in (("read", "tab:blue"), ("written", "tab:orange")):
            for which, style in (("general", "--"), ("this model", "-")):
                shares = [run["ratios"][which][edge] for run in found["runs"].values()]
                whose = "the general" if which == "general" else "this model's"
                label = f"{edge}, of {whose} formula"
                axis.plot(factors, shares, style, marker="o", color=color, label=label)
        axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.set_ylim(0, 1.35 * max(1.0, axis.get_ylim()[1]))
        axis.set_xlabel(f"ram, in multiples of the least ({found['minimum_ram'] / MB:.0f} MB)")
        axis.set_ylabel("bytes moved in a step / formula")
        axis.set_title(name)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk")
    parser.add_argument("--steps", type=int, help=f"the first {NUM_WARM_UP} do not count")
    parser.add_argument("--factors", nargs="*", type=float, help="of the least ram")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    reporting.add_arguments(parser)
    args = parser.parse_args()
    args.steps = args.steps or NUM_WARM_UP + (2 if args.short else 3)
    args.factors = args.factors or ([1.0, 1.5] if args.short else [1.0, 1.1, 1.25, 1.5, 2.0, 3.0])
    models = {"tiny": TINY} if args.short else {name: MODELS[name] for name in args.models}
    path = reporting.result_path("bytes_moved", is_short=args.short, given=args.result)
    report = reporting.new_report("bytes moved between RAM and disk in a step", models={})
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        for name, config in models.items():
            report["models"][name] = measure(name, config, args, disk)
            reporting.write(report, path)
    draw(report, path)


if __name__ == "__main__":
    main()
