"""One rank of one run of the user's program: `python -m zeepo.compare.child JOB.json RANK`.

The program runs as it would by itself. What it prints goes to a file, from which the first rank's
metric is read; its time and memory are measured from its first line on, after torch is imported.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

import zeepo
import zeepo.engine.api
from zeepo import events
from zeepo.compare.ways import Way
from zeepo.engine.tuning import tuned
from zeepo.launch import launching
from zeepo.launch.slices import Slices
from zeepo.verify.standin import make_zeepo_do_nothing, replace_functions


@dataclass(frozen=True)
class CompareJob:
    """One run, as it is written for its ranks."""

    script: str
    arguments: tuple[str, ...]
    way: Way
    seed: int
    disk: str
    ram: int | str | None
    folder: str

    def write(self) -> Path:
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> CompareJob:
        values = json.loads(path.read_text())
        return cls(**{**values, "way": Way(**values["way"])})


def memory_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def run(job: CompareJob, rank: int) -> dict[str, Any]:
    """Train as one rank; what is to be told of it."""
    _shift_seeds(job.seed)
    _take_place(job, rank)
    _set_up(job)
    budgets = _listen_for_budgets()
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    started = time.perf_counter()
    failure = ""
    try:
        with tuned(least_ram=job.way.is_on_disk and job.ram is None):
            _run_program(job)
            zeepo.close()
    except SystemExit as error:
        failure = "" if error.code in (None, 0) else f"exit status {error.code}"
    except BaseException:
        failure = traceback.format_exc()
    return {
        "seconds": time.perf_counter() - started,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "failure": failure,
        "ram_bytes": budgets,
        "torch_version": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def _listen_for_budgets() -> list[int]:
    """Gets the `ram` of the first session that opens; then nobody listens, and nothing is timed
    but the program."""
    found: list[int] = []

    def note(event: events.Event) -> None:
        if event["event"] == "session_open":
            found.append(event["ram"])
            events.stop_listening(note)

    events.listen(note)
    return found


def _shift_seeds(seed: int) -> None:
    """Every seed that the program sets is another in every run; 0 leaves it as it is."""
    set_seed = torch.manual_seed

    def set_shifted(value: Any) -> torch.Generator:
        return set_seed(int(value) + seed)

    torch.manual_seed = set_shifted  # type: ignore[assignment]
    torch.manual_seed(0)
    random.seed(seed)
    np.random.seed(seed)


def _take_place(job: CompareJob, rank: int) -> None:
    num_ranks = job.way.num_ranks
    if num_ranks > 1:
        store = FileStore(str(Path(job.folder) / "store"), num_ranks)
        group = PrefixStore("group", store)
        patience = timedelta(minutes=30)
        dist.init_process_group(
            "gloo", store=group, rank=rank, world_size=num_ranks, timeout=patience
        )
        launching.slices = Slices(rank, num_ranks, PrefixStore("slices", store))


def _set_up(job: CompareJob) -> None:
    if job.way.engine == "plain":
        make_zeepo_do_nothing()
    elif job.way.engine == "ddp":
        from zeepo.compare.standin import make_zeepo_ddp

        make_zeepo_ddp()
    else:
        _override_options(job)


def _override_options(job: CompareJob) -> None:
    """The program's own placement and stage give way to those of the way."""
    init, lazy = zeepo.engine.api.init, zeepo.lazy
    automatic: list[Any] = []

    def init_this_way(*args: Any, **options: Any) -> Any:
        while automatic:
            automatic.pop().close()
        chosen = {**options, **job.way.options}
        for name in ("num_gpus", "ram", "disk", "params", "grads", "optimizer_state"):
            chosen.pop(name, None)
        if job.way.is_on_disk:
            chosen |= {"disk": job.disk, "params": "disk", "optimizer_state": "disk"}
            chosen |= {} if job.ram is None else {"ram": job.ram}
        return init(*args, **chosen)

    def lazy_this_way(ram: Any = None, *args: Any, **options: Any) -> zeepo.lazy:
        """The session would take its ram over."""
        return lazy(job.ram if job.way.is_on_disk else None, *args, **options)

    replace_functions({"init": init_this_way, "lazy": lazy_this_way})
    automatic.append(init_this_way())  # for a program that never calls it


def _run_program(job: CompareJob) -> None:
    sys.argv = [job.script, *job.arguments]
    sys.path.insert(0, str(Path(job.script).resolve().parent))
    runpy.run_path(job.script, run_name="__main__")


def main() -> None:
    job, rank = CompareJob.read(Path(sys.argv[1])), int(sys.argv[2])
    facts = run(job, rank)
    sys.stdout.flush()
    (Path(job.folder) / f"facts{rank}.json").write_text(json.dumps(facts))
    os._exit(1 if facts["failure"] else 0)


if __name__ == "__main__":
    main()
