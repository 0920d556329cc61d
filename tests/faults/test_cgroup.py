"""A memory cgroup is the judge: a run inside its budget survives, also when the limit is halved."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.memory_cgroup import MemoryCgroup
from zeepo.units import MiB

PROGRAM = """
import json, os, sys
import torch, zeepo
from torch import nn

torch.manual_seed(0)
is_plain = sys.argv[2] == "plain"
model = nn.Sequential(*[nn.Linear(768, 768) for _ in range(32)])  # 72 MiB, and three times as much
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
if not is_plain:
    zeepo.init(model, optimizer, disk=sys.argv[1])
for number in range(12):
    rows = torch.randn(16, 768, generator=torch.Generator().manual_seed(number))
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps(loss.item().hex()), flush=True)
    sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    group = MemoryCgroup()
    try:
        group.__enter__()
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    yield group
    group.__exit__()


def run(cgroup: MemoryCgroup, disk: Path, mode: str, limits: dict[int, int]) -> list[str]:
    """The losses; before step n the limit becomes limits[n], tried for as long as it takes."""
    losses: list[str] = []
    command = [sys.executable, "-c", PROGRAM, str(disk), mode]
    with cgroup.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            losses.append(json.loads(line))
            if len(losses) in limits:
                threading.Thread(target=lower, args=(cgroup, limits[len(losses)])).start()
            process.stdin.write("\n")
            process.stdin.flush()
        process.stdin.close()
    assert process.returncode == 0
    return losses


def lower(cgroup: MemoryCgroup, limit_bytes: int) -> None:
    for _ in range(200):
        try:
            cgroup.set_limit(limit_bytes)
            return
        except OSError:  # version 1 does not set a limit below what is in use
            time.sleep(0.05)


def test_halving_the_limit_in_the_middle_of_training(cgroup: MemoryCgroup, tmp_path: Path) -> None:
    plain = run(cgroup, tmp_path, "plain", {})
    cgroup.set_limit(1000 * MiB)
    losses = run(cgroup, tmp_path, "zeepo", {3: 500 * MiB})
    limit = int((cgroup.path / cgroup.names.limit).read_text())
    assert limit <= 500 * MiB, "it never made room for the new limit"
    assert losses == plain
