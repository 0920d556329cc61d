"""Recomputing really saves memory, for blocks and for a plain `nn.Sequential`.

Peak resident memory is read from the operating system, as in test_checkpoint_memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import re, sys, torch, zeepo
from pathlib import Path
from torch import nn

def peak_kib():
    # Not getrusage: its peak includes that of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

shape, activations, disk = sys.argv[1:]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 1024), nn.Linear(1024, 128)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

if shape == "blocks":
    model = Net()
else:
    model = nn.Sequential(*[m for _ in range(60) for m in (nn.Linear(128, 128), nn.Tanh())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = zeepo.init(model, optimizer, disk=disk, ram="160MiB", activations=activations)
for rows in (2, 2048):
    if rows == 2048:
        before = peak_kib()
    model(torch.randn(rows, 128, requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
session.close()
print(peak_kib() - before)
"""


def peak_growth_kib(shape: str, activations: str, disk: Path) -> int:
    disk.mkdir()
    command = [sys.executable, "-c", PROGRAM, shape, activations, str(disk)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["blocks", "sequential"])
def test_recomputing_saves_memory(shape: str, tmp_path: Path) -> None:
    kept = peak_growth_kib(shape, "ram", tmp_path / "ram")
    assert kept > 48 * 1024
    assert peak_growth_kib(shape, "recompute", tmp_path / "recompute") < 0.5 * kept
