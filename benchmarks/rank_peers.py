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
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rank_engines import CONFIGURATIONS, PEERS, ZEEPO, Configuration, written

HERE = Path(__file__).parent
ROOT = HERE.parent
MB = 1_000_000
NUM_WARM_UP = 2
BYTES_PER_PARAMETER = {"params": 4, "grads": 4, "state": 8}


def python_for(configuration: Configuration) -> str:
    """The interpreter of an engine's environment."""
    if configuration.kind != "deepspeed":
        return sys.executable
    return os.environ.get("PEERS_PYTHON", str(ROOT / ".peers" / "bin" / "python"))


def environment_for(configuration: Configuration, num_ranks: int, rank: int) -> dict[str, str]:
    found = {
        **os.environ,
        "OMP_NUM_THREADS": str(configuration.num_threads),
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    if configuration.kind == "deepspeed":
        home = Path(python_for(configuration)).parent.parent  # what it compiles is built there once
        found |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions")}
        found.pop("PYTHONPATH", None)
    return found


def run(
    configuration: Configuration,
    num_ranks: int,
    model: dict[str, Any],
    num_steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Train with one process for each rank; what they tell, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(
            json.dumps(
                {
                    "configuration": written(configuration),
                    "num_ranks": num_ranks,
                    "model": model,
                    "num_steps": num_steps,
                }
            )
        )
        command = [python_for(configuration), str(HERE / "rank_engines.py"), str(job)]
        outputs = [(Path(folder) / f"output{rank}").open("w+") for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment_for(configuration, num_ranks, rank),
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(num_ranks)
        ]
        is_done = _wait(ranks, seconds)
        said = [Path(output.name).read_text() for output in outputs]
        for output in outputs:
            output.close()
        if not is_done:
            return {"failed": _last_words(said) or f"no end in {seconds:.0f} s"}
        facts = [
            json.loads((Path(folder) / f"facts{rank}.json").read_text())
            for rank in range(num_ranks)
        ]
    return _figures(facts)


def _wait(ranks: Sequence[subprocess.Popen[Any]], seconds: float) -> bool:
    """Until all have ended well; when one has not, the others are ended too."""
    deadline = time.monotonic() + seconds
    codes: list[int | None] = [None]
    try:
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)  # with the children it may have
                rank.wait()
    return not any(codes) and None not in codes


def _last_words(said: Sequence[str]) -> str:
    """The last error anybody told, without paths."""
    lines = [line for text in said for line in text.splitlines()]
    errors = [line for line in lines if re.search(r"^\S*Error\b", line)]
    return re.sub(r"(/[\w.-]+)+", "...", errors[-1])[:200] if errors else ""


def _figures(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures from what its ranks told."""
    peaks = [max(fact["peak_of_set_up"], fact["peak_of_steps"]) for fact in facts]
    resident = max(fact["resident_after_import"] for fact in facts)
    return {
        "seconds_per_step": max(statistics.median(f["seconds"][NUM_WARM_UP:]) for f in facts),
        "peak_bytes": max(peaks),
        "peak_bytes_above_import": max(peaks) - resident,
        "peak_of_steps_above_import": max(f["peak_of_steps"] for f in facts) - resident,
        "seconds": [fact["seconds"] for fact in facts],
        "losses": [fact["losses"] for fact in facts],
        "bill": facts[0].get("bill", {}),
    }


def loss_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest relative difference of any loss; 0.0 means every bit is equal."""
    pairs = [
        (float.fromhex(a), float.fromhex(b))
        for mine, other in zip(ours["losses"], theirs["losses"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def describe(configuration: Configuration, facts: dict[str, Any]) -> str:
    if "failed" in facts:
        return f"{configuration.label:<40} failed: {facts['failed']}"
    return (
        f"{configuration.label:<40} {facts['seconds_per_step']:6.2f} s  "
        f"peak {facts['peak_bytes'] / MB:6.0f} MB, "
        f"{facts['peak_bytes_above_import'] / MB:6.0f} above import"
    )


def tune(engines: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Every configuration once (--quick: the first); the fastest of each engine."""
    best: dict[str, Configuration] = {}
    tried: dict[str, Any] = {}
    for engine in engines:
        candidates = CONFIGURATIONS[engine][: 1 if args.quick else None]
        if engine == "zeepo3" and args.disk:
            options = {"disk": args.disk, "ram": args.ram}
            candidates = [*candidates, Configuration(engine, f"on disk, {args.ram}", options)]
        for configuration in candidates:
            facts = args.known.get(configuration.label)
            if facts is None:
                facts = run(configuration, 2, args.model, args.tuning_steps, args.seconds)
            tried[configuration.label] = facts
            print(describe(configuration, facts), flush=True)
            fastest = best.get(engine)
            if "failed" not in facts and (
                fastest is None
                or facts["seconds_per_step"] < tried[fastest.label]["seconds_per_step"]
            ):
                best[engine] = configuration
    return {"best": best, "tried": tried}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The engines in turns, each in its best configuration."""
    engines = args.engines or [*PEERS, *ZEEPO]
    tuned = tune(engines, args)
    turns: dict[str, list[dict[str, Any]]] = {engine: [] for engine in tuned["best"]}
    for turn in range(args.turns):
        order = list(turns)[:: 1 if turn % 2 else -1]
        for engine in order:
            facts = run(tuned["best"][engine], 2, args.model, args.steps, args.seconds)
            print(f"turn {turn}: {describe(tuned['best'][engine], facts)}", flush=True)
            turns[engine].append(facts)
        keep(args, {"rows": _rows(tuned, turns), "tried": _all_short(tuned), "num_ranks": 2})
    rows = _rows(tuned, turns)
    print_rows(rows)
    return {"rows": rows, "tried": _all_short(tuned), "num_ranks": 2}


def _rows(tuned: dict[str, Any], turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the turns so far come to, by engine."""
    rows = {}
    for engine, runs in turns.items():
        good = [facts for facts in runs if "failed" not in facts]
        if good:
            rows[engine] = _row(tuned["best"][engine], good)
    reference = next((facts for facts in turns.get("ddp", []) if "failed" not in facts), None)
    for engine, row in rows.items():
        first = next(facts for facts in turns[engine] if "failed" not in facts)
        row["loss_difference"] = None if reference is None else loss_difference(first, reference)
    return rows


def _all_short(tuned: dict[str, Any]) -> dict[str, Any]:
    return {label: _short(facts) for label, facts in tuned["tried"].items()}


def _short(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key != "losses"}


def _row(configuration: Configuration, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sorted(facts["seconds_per_step"] for facts in runs)
    return {
        "configuration": configuration.name,
        "num_threads": configuration.num_threads,
        "seconds_per_step": statistics.median(seconds),
        "seconds_of_turns": seconds,
        **{
            key: int(statistics.median(facts[key] for facts in runs))
            for key in ("peak_bytes", "peak_bytes_above_import", "peak_of_steps_above_import")
        },
    }


def print_rows(rows: dict[str, dict[str, Any]]) -> None:
    heads = "engine, best configuration, s/step, spread, peak RSS per rank in MB, above import"
    print(f"\n| {' | '.join(heads.split(', '))} | losses against DDP |")
    print("|---|---|---|---|---|---|---|")
    for engine, row in rows.items():
        spread = f"{row['seconds_of_turns'][0]:.2f} to {row['seconds_of_turns'][-1]:.2f}"
        difference = row["loss_difference"]
        losses = "-" if difference is None else f"{difference:.1e}" if difference else "same bits"
        print(
            f"| {engine} | {row['configuration']} | {row['seconds_per_step']:.2f} | {spread} | "
            f"{row['peak_bytes'] / MB:.0f} | {row['peak_bytes_above_import'] / MB:.0f} | {losses} |"
        )


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
            facts = run(configuration, num_ranks, args.model, args.steps, args.seconds)
            formula = formula_bytes(stage, num_ranks, num_parameters)
            row = {"ranks": num_ranks, "stage": stage, "formula_bytes": formula, **_short(facts)}
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
    keep(args, measure_memory(args) if args.ranks else compare(args))


def keep(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Write what is known so far."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    report = {
        "question": "memory of ranks against ZeRO's formula"
        if args.ranks
        else "step time and memory of ranks beside DDP, FSDP2 and DeepSpeed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": {**args.model, "batch": 1, "sequence": 256},
        "num_steps": args.steps,
        "num_tuning_steps": args.tuning_steps,
        "num_warm_up": NUM_WARM_UP,
        **answer,
    }
    name = "rank_memory.json" if args.ranks else "rank_peers.json"
    path = args.result or HERE / "results" / name
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
