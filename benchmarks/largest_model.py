"""Which GPT is the largest that can be trained in a given RAM: zeepo beside its peers?

    python benchmarks/largest_model.py --disk DIRECTORY [--budgets 1 2 4 8] [--update backward]
                                       [--engines ...] [--full] [--largest 5.2e9] [--short]

Each try is a child in a memory cgroup (root is needed), swap off, whose limit is the budget and
what the cgroup was charged once torch and the engine were imported. It survives with two optimizer
steps on 1 x 64 tokens and finite losses. Models are the rungs of a ladder, each about 1.25 times
the one before, the same for all: vocabulary 50304, blocks recomputed in backward, a layer and a
head for every 64 of the width. An engine's answer is the best of its configurations: the first is
searched, each other one has to beat it. zeepo begins with the least model that is ten times the
best peer's; if that survives the answer is "at least", unless --full asks for more, up to --largest
parameters.

Every try is written when it is over; an interrupted run goes on where it stopped. --again ENGINE
forgets that engine's tries.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import reporting
from engine_runs import command_for, environment_for, lacks, last_words
from ladder import LARGEST, SEQUENCE, SPACING, WIDTHS, Rung, fitted, ladder, search
from memory_cgroup import MemoryCgroup
from rank_engines import (
    CPU,
    DISK,
    FEW_LIVE,
    NVME,
    ONE_RANK,
    Configuration,
    written,
)

GiB = 1 << 30
GOAL = 10.0
NUM_STEPS = 2
BYTES_PER_PARAMETER = 16
"""Of fp32 training with AdamW: the first guess of what fits."""


def configurations(args: argparse.Namespace, budget_bytes: int) -> dict[str, list[Configuration]]:
    """What is tried of each engine; memory is the question, so peers keep as little as they can."""
    few = {**FEW_LIVE, "overlap_comm": False, "optimizer": "cpu_adam"}
    groups = {"sub_group_size": 5_000_000}
    split = {"zero_init": True, "offload_param": CPU}
    threads = ONE_RANK["plain"][0].num_threads

    def deepspeed(engine: str, offload: dict[str, Any]) -> list[Configuration]:
        few_groups = {**few, **groups, "offload_optimizer": offload}
        on_nvme = {**NVME, "buffer_count": 3, "buffer_size": LARGEST}
        named: list[tuple[str, dict[str, Any]]] = [
            ("few live", {**few, "offload_optimizer": offload}),
            ("few live, groups of 5M", few_groups),
            ("few live, groups of 5M, zero.Init", {**few_groups, **split}),
            ("the same, fused AdamW", {**few_groups, **split, "optimizer": "fused"}),
        ]
        if offload["device"] == "nvme":
            parameters = {"zero_init": True, "offload_param": on_nvme}
            named.append(("parameters on NVMe too", {**few_groups, **parameters}))
        return [Configuration(engine, name, options, threads) for name, options in named]

    zeepo: dict[str, Any] = {"ram": budget_bytes, "disk": DISK, "lazy": True}
    zeepo |= dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
    if args.update != "step":
        zeepo["update"] = args.update
    meta = {"blocks": 1, "meta": True}  # other initial values: for memory that does not matter
    fsdp = [
        *(c for c in [*ONE_RANK["fsdp2"], *ONE_RANK["fsdp2-cpu"]] if "kept" not in c.name),
        Configuration("fsdp2", "per block, built on meta", meta, threads),
        Configuration("fsdp2", "offloaded, built on meta", {**meta, "offload": True}, threads),
    ]
    few_plain = {key: value for key, value in few.items() if key != "optimizer"}
    return {
        "plain": ONE_RANK["plain"],
        "fsdp2": fsdp,
        "deepspeed3": [
            Configuration("deepspeed3", "few live", few_plain, threads),
            Configuration("deepspeed3", "zero.Init", {**few_plain, "zero_init": True}, threads),
            Configuration("deepspeed3", "groups of 5M", {**few_plain, **groups}, threads),
        ],
        "deepspeed3-cpu": deepspeed("deepspeed3-cpu", CPU),
        "deepspeed3-nvme": deepspeed("deepspeed3-nvme", NVME),
        "zeepo": [Configuration("zeepo", f"update={args.update}", zeepo, threads)],
    }


@dataclass
class Tries:
    """Every try so far, on disk after each; one that is known is not done again."""

    report: dict[str, Any]
    path: Path
    disk: str | None
    seconds: float

    def survives(self, configuration: Configuration, rung: Rung, budget_bytes: int) -> bool:
        key = f"{budget_bytes / GiB:g} GiB, {configuration.label}, {rung}"
        facts = self.report["tries"].get(key)
        if facts is None:
            facts = attempt(configuration, rung, budget_bytes, self.disk, self.seconds)
            facts |= {"commit": reporting.commit(), "engine": configuration.engine}
            self.report["tries"][key] = facts
            reporting.write(self.report, self.path)
            print(f"{key}: {facts['outcome']}, {facts['seconds']:.0f} s", flush=True)
        return bool(facts["outcome"] == "survived")


def attempt(
    configuration: Configuration, rung: Rung, budget_bytes: int, disk: str | None, seconds: float
) -> dict[str, Any]:
    """Two steps in a cgroup; what became of it."""
    if lacking := lacks(configuration):
        raise SystemExit(lacking)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=disk) as scratch,
        MemoryCgroup() as cgroup,
    ):
        job = Path(folder) / "job.json"
        task = {"num_ranks": 1, "model": rung.options, "num_steps": NUM_STEPS, "has_gate": True}
        placed = configuration.on(scratch)
        placed = replace(placed, options=fitted(placed.options, rung))
        job.write_text(json.dumps({**task, "configuration": written(placed)}))
        errors = (Path(folder) / "stderr").open("w+")
        child = cgroup.start(
            [*command_for(configuration, job), "0"],
            env=environment_for(configuration, 1, 0),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            charged = _let_through(child, cgroup, budget_bytes)
            code = child.wait()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            cgroup.kill_all()
        errors.seek(0)
        told = Path(folder) / "facts0.json"
        facts = json.loads(told.read_text()) if told.exists() else {}
        outcome = outcome_of(code, facts, errors.read(), is_late)
        errors.close()
        found = {
            "outcome": outcome,
            "parameters": rung.num_parameters,
            "width": rung.width,
            "budget_bytes": budget_bytes,
            "charged_after_import": charged,
            "peak_bytes": cgroup.peak_bytes(),
            "seconds": round(time.monotonic() - started, 1),
        }
    if facts:
        found |= {"step_seconds": facts["seconds"], "set_up_seconds": facts["set_up_seconds"]}
        found |= {"losses": facts["losses"], "peak_resident": facts["peak_of_steps"]}
    return found


def _let_through(child: subprocess.Popen[str], cgroup: MemoryCgroup, budget_bytes: int) -> int:
    """Once everything is imported, set the limit and let the child go on; what was charged."""
    assert child.stdout is not None
    assert child.stdin is not None
    for line in child.stdout:
        if line.strip() == "imported":
            break
    else:
        return 0
    charged = cgroup.usage_bytes()
    cgroup.set_limit(charged + budget_bytes)
    child.stdin.write("\n")
    child.stdin.flush()
    # What it says from now on must not fill the pipe.
    threading.Thread(target=child.stdout.read, daemon=True).start()
    return charged


def outcome_of(code: int, facts: dict[str, Any], said: str, is_late: bool) -> str:
    """`survived`, or why not."""
    if is_late:
        return "too slow"
    if code == -signal.SIGKILL:
        return "killed"
    if code:
        words = last_words([said]) or said.strip()[-200:] or f"exit code {code}"
        return f"{'refused' if 'BudgetError' in words else 'failed'}: {words}"
    losses = [float.fromhex(loss) for loss in facts["losses"]]
    return "survived" if all(map(math.isfinite, losses)) else "loss not finite"


def best_of(
    tries: Tries,
    candidates: Sequence[Configuration],
    rungs: Sequence[Rung],
    budget_bytes: int,
    start: int,
) -> dict[str, Any]:
    """The highest rung of any configuration: the first is searched, the others have to beat it."""
    best, name = -1, ""
    for configuration in candidates:

        def survives(place: int, configuration: Configuration = configuration) -> bool:
            return tries.survives(configuration, rungs[place], budget_bytes)

        found = search(survives, len(rungs), best + 1 if best >= 0 else start, best)
        if found > best:
            best, name = found, configuration.name
    return _answer(rungs, best, name, is_least=best == len(rungs) - 1)


def _answer(rungs: Sequence[Rung], place: int, name: str, *, is_least: bool) -> dict[str, Any]:
    return {
        "parameters": rungs[place].num_parameters if place >= 0 else 0,
        "width": rungs[place].width if place >= 0 else 0,
        "configuration": name,
        "at_least": is_least and place >= 0,
    }


def prove(
    tries: Tries, ours: Configuration, rungs: Sequence[Rung], budget_bytes: int, wanted: float
) -> dict[str, Any]:
    """Whether zeepo trains what was wanted; if not, what it does train."""
    least = next(rung for rung in map(Rung, WIDTHS) if rung.num_parameters >= wanted)
    if tries.survives(ours, least, budget_bytes):
        return _answer([least], 0, ours.name, is_least=True)
    smaller = [rung for rung in rungs if rung.num_parameters < least.num_parameters]
    return best_of(tries, [ours], smaller, budget_bytes, len(smaller) - 1)


def measure(args: argparse.Namespace, tries: Tries, rungs: Sequence[Rung]) -> None:
    """All budgets: peers first, then what zeepo has to show."""
    for budget_gib in args.budgets:
        budget_bytes = int(budget_gib * GiB)
        found = tries.report["answers"].setdefault(f"{budget_gib:g}", {})
        guess = budget_bytes / BYTES_PER_PARAMETER
        start = max(0, sum(rung.num_parameters <= guess for rung in rungs) - 1)
        candidates = configurations(args, budget_bytes)
        for engine in args.engines:
            if engine != "zeepo":
                some = candidates[engine][: args.configurations]
                found[engine] = best_of(tries, some, rungs, budget_bytes, start)
        if "zeepo" in args.engines:
            peers = [answer["parameters"] for who, answer in found.items() if who != "zeepo"]
            wanted = GOAL * max(peers, default=guess / GOAL)
            ours = candidates["zeepo"][0]
            if args.full:
                found["zeepo"] = best_of(tries, [ours], rungs, budget_bytes, start)
            else:
                found["zeepo"] = prove(tries, ours, rungs, budget_bytes, wanted)
        reporting.write(tries.report, tries.path)


def print_answers(report: dict[str, Any]) -> None:
    rows = []
    for budget, found in report["answers"].items():
        best_peer = max((a["parameters"] for e, a in found.items() if e != "zeepo"), default=0)
        for engine, answer in found.items():
            is_ours = engine == "zeepo" and best_peer > 0
            ratio = f"{answer['parameters'] / best_peer:.1f}" if is_ours else ""
            least = "≥ " if answer["at_least"] else ""
            size = f"{least}{answer['parameters'] / 1e6:.0f}"
            rows.append([f"{budget} GiB", engine, size, answer["configuration"], ratio])
    heads = ["budget", "engine", "parameters, millions", "configuration", "of the best peer"]
    reporting.print_table("the largest GPT that trains", heads, rows)


def draw(report: dict[str, Any], path: Path) -> None:
    figure, axis = reporting.new_plot(8.5)
    answers = report["answers"]
    engines = list(dict.fromkeys(engine for found in answers.values() for engine in found))
    width = 0.85 / len(engines)
    for index, engine in enumerate(engines):
        sizes = [found.get(engine, {}).get("parameters", 0) / 1e6 for found in answers.values()]
        places = [p + (index - (len(engines) - 1) / 2) * width for p in range(len(answers))]
        color = "tab:orange" if engine == "zeepo" else plot_color(index)
        bars = axis.bar(places, sizes, 0.92 * width, label=engine, color=color)
        least = [found.get(engine, {}).get("at_least") for found in answers.values()]
        labels = [
            f"{'≥ ' if is_least else ''}{size:.0f}" if size else "none"
            for size, is_least in zip(sizes, least, strict=True)
        ]
        axis.bar_label(bars, labels, fontsize=7, padding=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_ylim(top=4 * axis.get_ylim()[1])
    axis.set_xticks(range(len(answers)), [f"{budget} GiB" for budget in answers])
    axis.set_xlabel("RAM given, beyond what importing took")
    axis.set_ylabel("parameters, millions (log)")
    axis.set_title("The largest GPT that trains, fp32 AdamW, 64 tokens")
    axis.legend(ncols=3, frameon=False, fontsize=8)
    reporting.save_plot(figure, report, path)


def plot_color(index: int) -> Any:
    """Shades of blue and gray for the peers."""
    import matplotlib

    return matplotlib.colormaps["Blues"](0.35 + 0.13 * (index % 5))


def main() -> None:
    engines = ["plain", "fsdp2", "deepspeed3", "deepspeed3-cpu", "deepspeed3-nvme", "zeepo"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", nargs="*", type=float, help="in GiB")
    parser.add_argument("--engines", nargs="*", choices=engines)
    parser.add_argument("--disk", help="for zeepo's and DeepSpeed's files")
    parser.add_argument("--update", choices=("step", "backward"), default="step")
    parser.add_argument("--full", action="store_true", help="find zeepo's own limit")
    parser.add_argument("--largest", type=float, default=5.2e9, help="parameters of the ladder")
    parser.add_argument("--spacing", type=float, default=SPACING, help="of the ladder")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for one try")
    parser.add_argument("--configurations", type=int, help="of each peer, at most")
    parser.add_argument("--again", nargs="*", default=[], help="engines whose tries are forgotten")
    reporting.add_arguments(parser)
    args = parser.parse_args()
    args.budgets = args.budgets or ([0.5] if args.short else [1, 2, 4, 8])
    args.engines = args.engines or (["plain", "zeepo"] if args.short else engines)
    path = reporting.result_path("largest_model", is_short=args.short, given=args.result)
    rungs = ladder(12e6, 8e7 if args.short else args.largest, 1.5 if args.short else args.spacing)
    report = reporting.new_report(
        "the largest trainable GPT in a given RAM",
        num_steps=NUM_STEPS,
        batch=[1, SEQUENCE],
        ladder=[rung.num_parameters for rung in rungs],
        tries={},
        answers={},
    )
    if path.exists() and not args.short:
        kept = json.loads(path.read_text())
        report["answers"] = kept["answers"]
        report["tries"] = {
            key: facts for key, facts in kept["tries"].items() if facts["engine"] not in args.again
        }
    tries = Tries(report, path, args.disk, args.seconds)
    measure(args, tries, rungs)
    print_answers(report)
    draw(report, path)


if __name__ == "__main__":
    main()
