"""What does a step cost on several ranks, and how much memory, beside DDP, FSDP2 and DeepSpeed?

    python benchmarks/rank_peers.py [--quick] [--disk DIRECTORY]    # 2 ranks, every engine
    python benchmarks/rank_peers.py --ranks 1,2,4                   # zeepo's memory and the formula

Each run is a process group of its own. Every configuration of an engine runs once; then the best of
each runs in turns with the others'. A run's figure is the median of its counted steps (of the
slowest rank) and the peak resident memory of the largest rank; an engine's is the median over
turns, the spread beside it. Losses are compared with DDP's. DeepSpeed runs in an environment of its
own (`make peers-env`). Writes JSON under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import reporting
from engine_runs import MB, NUM_WARM_UP, Setting, print_rows, run, take_turns, tune, without_losses
from rank_engines import CONFIGURATIONS, DISK, PEERS, ZEEPO, Configuration

BYTES_PER_PARAMETER = {"params": 4, "grads": 4, "state": 8}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The engines in turns, each in its best configuration (--quick: in its first)."""
    candidates = {
        engine: CONFIGURATIONS[engine][: 1 if args.quick else None]
        for engine in args.engines or [*PEERS, *ZEEPO]
    }
    if "zeepo3" in candidates and args.disk:
        on_disk = {"disk": DISK, "ram": args.ram}
        candidates["zeepo3"].append(Configuration("zeepo3", f"on disk, {args.ram}", on_disk))
    tuned = tune(candidates, args.setting, args.known)
    answer = {"tried": tuned.short(), "num_ranks": 2}
    rows = take_turns(tuned, args.setting, lambda rows: keep(args, {"rows": rows, **answer}))
    print_rows("2 ranks", rows, "DDP")
    return {"rows": rows, **answer}


def formula_bytes(stage: int, num_ranks: int, num_parameters: int) -> int:
    """What ZeRO leaves on each rank of fp32 training with AdamW."""
    total = 0
    for kind, first_stage in (("state", 1), ("grads", 2), ("params", 3)):
        share = num_ranks if stage >= first_stage else 1
        total += BYTES_PER_PARAMETER[kind] * num_parameters // share
    return total


def count_parameters(model: dict[str, Any]) -> int:
    import torch
    from gpt import GPT, GPTConfig

    with torch.device("meta"):
        return sum(p.numel() for p in GPT(GPTConfig(**model)).parameters())


def declared_bytes(bill: dict[str, int], stage: int, num_ranks: int, num_parameters: int) -> int:
    """What the plan says it needs beside the training state: torch itself, activations, wholes in
    use, buffers for other ranks, and what the allocator loses."""
    share = num_ranks if stage >= 3 else 1
    wholes = bill["params"] - BYTES_PER_PARAMETER["params"] * num_parameters // share
    tags = ("torch itself", "activations", "staging", "slack")
    return max(0, wholes) + sum(bill.get(tag, 0) for tag in tags)


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """zeepo's peak per rank against the formula and the buffers that its plan declares beside it;
    and against the whole bill, in which no gradient has left for its owner before backward ends."""
    num_parameters = count_parameters(args.model)
    rows = []
    print("| ranks | stage | peak above import, MB | formula | formula and buffers | bill |")
    print("|---|---|---|---|---|---|")
    for num_ranks in args.ranks:
        for stage in (1, 2, 3) if num_ranks > 1 else (3,):
            configuration = Configuration(f"zeepo{stage}", "in RAM")
            facts = run(configuration, replace(args.setting, num_ranks=num_ranks), args.steps)
            formula = formula_bytes(stage, num_ranks, num_parameters)
            row = {
                "ranks": num_ranks,
                "stage": stage,
                "formula_bytes": formula,
                **without_losses(facts),
            }
            rows.append(row)
            if "failed" in facts:
                print(f"| {num_ranks} | {stage} | failed: {facts['failed']} |||| ", flush=True)
                continue
            declared = declared_bytes(facts["bill"], stage, num_ranks, num_parameters)
            row["declared_bytes"] = declared
            expected = [formula, formula + declared, sum(facts["bill"].values())]
            figures = [facts["peak_of_steps_above_import"], *expected]
            told = " | ".join(f"{figure / MB:.0f}" for figure in figures)
            print(f"| {num_ranks} | {stage} | {told} |", flush=True)
    return {"rows": rows, "parameters": num_parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one configuration, one turn")
    parser.add_argument("--engines", nargs="*", choices=list(CONFIGURATIONS))
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--disk", help="try zeepo's stage 3 also with everything on this disk")
    parser.add_argument("--ram", default="1GiB", help="for each rank, with --disk")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--steps", type=int, help=f"of a run, the first {NUM_WARM_UP} uncounted")
    parser.add_argument("--tuning-steps", type=int, help="of a run that only looks for the best")
    parser.add_argument("--seconds", type=float, default=600.0, help="for one run")
    parser.add_argument("--tuned", type=Path, help="a result whose tuning is not done again")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    args.turns = args.turns if args.turns is not None else 1 if args.quick else 5
    args.steps = args.steps or (4 if args.quick else 8)
    args.tuning_steps = args.tuning_steps or args.steps
    args.model = {"num_layers": args.layers}
    args.known = json.loads(args.tuned.read_text())["tried"] if args.tuned else {}
    args.setting = Setting(
        num_ranks=2,
        model=args.model,
        num_steps=args.steps,
        num_tuning_steps=args.tuning_steps,
        num_turns=args.turns,
        seconds=args.seconds,
        disk=args.disk,
    )
    keep(args, measure_memory(args) if args.ranks else compare(args))


def keep(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Write what is known so far."""
    report = reporting.new_report(
        "memory of ranks against ZeRO's formula"
        if args.ranks
        else "step time and memory of ranks beside DDP, FSDP2 and DeepSpeed",
        model={**args.model, "batch": 1, "sequence": 256},
        num_steps=args.steps,
        num_tuning_steps=args.tuning_steps,
        num_warm_up=NUM_WARM_UP,
        **answer,
    )
    name = "rank_memory" if args.ranks else "rank_peers"
    reporting.write(report, reporting.result_path(name, given=args.result))


if __name__ == "__main__":
    main()
