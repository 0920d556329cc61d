"""Does a run stay inside what it was given? Five models in memory cgroups, swap off.

The judge is the kernel: a child that needs more than its cgroup's limit is killed, and the cgroup's
own high-water mark is kept. Three questions:

    python benchmarks/budget.py prove [NAMES]     # a stated ram, limit = ram + RSS after import
    python benchmarks/budget.py minimum [NAMES]   # ram = plan.minimum_ram: limits around it
    python benchmarks/budget.py export [NAMES]    # as prove, with one step and an export at the end

Losses of every run that survives are compared bit for bit with plain PyTorch's. Needs root for the
cgroups. Writes JSON under benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RAM = {"gpt": "1GiB", "llama": "1GiB", "mlp": "512MiB", "cnn": "700MiB", "lstm": "800MiB"}
MiB = 1 << 20
STEPS = 6
"""The first two show what is true, which the others go by."""
SHARES = (1 / 0.9, 1.0, 0.93, 1 / 1.15, 0.8, 0.7)
"""Of `minimum_ram`, limits that are tried: right is what survives at the first, and not at 0.8."""


def child(name: str, ram: str, disk: str, num_steps: int, export_to: str = "") -> None:
    """Train one of the models and tell what happens, a JSON line each."""
    import torch

    import zeepo

    if name == "llama":  # not ours, and not torch's: part of what is there before
        import transformers.models.llama.modeling_llama  # noqa: F401
    from budget_models import JOBS

    def tell(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    page_bytes = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes
    tell(resident=resident)
    job = JOBS[name]
    torch.manual_seed(0)
    is_plain = ram == "plain"
    lazy = contextlib.nullcontext() if is_plain else zeepo.lazy(disk=disk)
    with lazy:
        model = job.build()
    tell(parameters=sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    session = None
    if not is_plain:
        budget: int | str = int(ram) if ram.isdigit() else ram
        session = zeepo.init(model, optimizer, ram=budget, disk=disk)
    random = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        started = time.perf_counter()
        loss = job.loss(model, random)
        if session is not None:
            tell(minimum_ram=session.plan.minimum_ram, moment=session.plan.moment())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(loss=loss.item().hex(), seconds=time.perf_counter() - started)
    if export_to:
        if session is not None:
            session.export(export_to)
        else:
            tell(values_equal=_equals_exported(model, Path(export_to)))
    os._exit(0)  # giving the model back is not the question here


def _equals_exported(model: Any, folder: Path) -> bool:
    """Whether a plainly trained model has the exported values, bit for bit."""
    import torch
    from safetensors.torch import load_file

    exported: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        exported |= load_file(path)
    state = model.state_dict()
    return set(state) == set(exported) and all(torch.equal(state[k], exported[k]) for k in state)


def run(
    name: str,
    ram: str,
    limit_bytes: int | None,
    num_steps: int,
    export_to: str = "",
    *,
    above_charge: bool = False,
    heeds_limit: bool = True,
) -> dict[str, Any]:
    """One child in a cgroup of its own; `limit_bytes` is beyond what it has after import.

    That is its resident size, or with `above_charge` what the cgroup was charged for it: less,
    because pages of libraries that others have mapped before are not charged again. Without
    `heeds_limit` it is not refused for a limit below its least, so that the kernel alone judges.
    """
    from memory_cgroup import MemoryCgroup

    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk, MemoryCgroup() as cgroup:
        command = [sys.executable, __file__, "child", name, ram, disk, str(num_steps), export_to]
        errors = (Path(disk) / "stderr").open("w+")
        environment = {**os.environ, "ZEEPO_TUNING_REFUSE_LACK": str(int(heeds_limit))}
        process = cgroup.start(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        facts: dict[str, Any] = {"losses": [], "seconds": [], "limit_bytes": limit_bytes}
        assert process.stdout is not None
        for line in process.stdout:
            fact = json.loads(line)
            if "resident" in fact:
                facts["usage_after_import"] = cgroup.usage_bytes()
                if limit_bytes is not None:
                    base = facts["usage_after_import"] if above_charge else fact["resident"]
                    cgroup.set_limit(base + limit_bytes)
                    facts["above_charge"] = above_charge
            if "loss" in fact:
                facts["losses"].append(fact.pop("loss"))
                facts["seconds"].append(round(fact.pop("seconds"), 2))
            facts.update(fact)
        facts["exit_code"] = process.wait()
        facts["survived"] = facts["exit_code"] == 0
        errors.seek(0)
        said = "" if facts["survived"] else errors.read()
        facts["last_words"] = said[said.rfind("zeepo.errors.") :][:300] if said else ""
        errors.close()
        facts["peak_bytes"] = cgroup.peak_bytes()
    return facts


def describe(facts: dict[str, Any]) -> str:
    peak = (facts["peak_bytes"] - facts["usage_after_import"]) / MiB
    limit = "none" if facts["limit_bytes"] is None else f"{facts['limit_bytes'] / MiB:.0f}"
    verdict = "survived" if facts["survived"] else "killed"
    if facts["exit_code"] > 0:
        verdict = f"refused ({(facts['last_words'].splitlines() or ['?'])[0][:160]})"
    base = "charge" if facts.get("above_charge") else "RSS"
    return f"limit {limit:>5} MiB over {base} after import: {verdict}, cgroup grew {peak:.0f} MiB"


def prove(name: str) -> dict[str, Any]:
    """The stated budget, in a cgroup of just that."""
    plain = run(name, "plain", None, STEPS)
    print(f"{name}: plain {describe(plain)}", flush=True)
    nbytes = _bytes(RAM[name])
    bounded = run(name, RAM[name], nbytes, STEPS)
    is_equal = bounded["losses"] == plain["losses"]
    print(f"{name}: ram={RAM[name]} {describe(bounded)}, losses equal: {is_equal}", flush=True)
    return {"plain": plain, "bounded": bounded, "losses_equal": is_equal, "ram": RAM[name]}


def export(name: str) -> dict[str, Any]:
    """A step and an export inside the budget; a plain process does the same step and compares."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        bounded = run(name, RAM[name], _bytes(RAM[name]), 1, folder)
        print(f"{name}: exported, ram={RAM[name]} {describe(bounded)}", flush=True)
        plain = run(name, "plain", None, 1, folder)
    print(f"{name}: values equal bit for bit: {plain.get('values_equal')}", flush=True)
    return {"bounded": bounded, "plain": plain, "ram": RAM[name]}


def minimum(name: str) -> dict[str, Any]:
    """`plan.minimum_ram` against the smallest cgroup in which a run with it survives."""
    predicted = run(name, "8GiB", None, 1)["minimum_ram"]
    tries = {}
    survives = dies = None
    for share in SHARES:
        limit = int(predicted * share)
        facts = run(name, str(predicted), limit, 2, above_charge=True, heeds_limit=False)
        tries[f"{share:.3f}"] = facts
        print(
            f"{name}: least {predicted / MiB:.0f} MiB, x{share:.3f} {describe(facts)}", flush=True
        )
        if not facts["survived"]:
            dies = limit
            break
        survives = limit
    return {"minimum_ram": predicted, "survives": survives, "dies": dies, "tries": tries}


def _bytes(text: str) -> int:
    from zeepo.units import parse_bytes

    return parse_bytes(text)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:5], int(sys.argv[5]), *sys.argv[6:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["prove", "minimum", "export"])
    parser.add_argument("names", nargs="*", default=list(RAM))
    args = parser.parse_args()
    answer = {"prove": prove, "minimum": minimum, "export": export}[args.question]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    path = RESULTS / f"budget_{args.question}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"models": {}}
    kept |= {"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"}
    for name in args.names or RAM:
        facts = answer(name) | {
            "commit": commit,
            "date": datetime.now(UTC).isoformat("T", "minutes"),
        }
        kept["models"][name] = facts
        path.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
