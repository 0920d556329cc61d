"""Export and load stay inside the budget: resident memory is read from the operating system.

A process of its own builds lazily, trains with a small `ram`, exports and loads while a thread
samples its resident memory. This process, which knows no session, trains plainly and compares
every bit of the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zeepo.units import MiB

COMMON = """
import torch
from torch import nn

def build(width, depth):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

def train(model, optimizer, width):
    for step in range(2):
        model(torch.ones(2, width) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

PROGRAM = (
    COMMON
    + """
import filecmp, json, os, sys, threading, time
import zeepo

folder, width, depth, ram = sys.argv[1], *map(int, sys.argv[2:])

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Watch:
    peak = 0
    is_over = False

    def sample(self):
        while not self.is_over:
            self.peak = max(self.peak, resident())
            time.sleep(0.001)

peaks = []

def growth_of(action):
    before, watch = resident(), Watch()
    thread = threading.Thread(target=watch.sample)
    thread.start()
    action()
    watch.is_over = True
    thread.join()
    peaks.append(watch.peak - at_start)
    return watch.peak - before

at_start = resident()
with zeepo.lazy(ram=ram // 2, disk=folder):
    model = build(width, depth)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with zeepo.init(model, optimizer, ram=ram, disk=folder) as session:
    train(model, optimizer, width)
    # the first use after training fills the managed part of the budget again
    session.export(f"{folder}/one.safetensors")
    growths = [growth_of(action) for action in (
        lambda: session.export(f"{folder}/shards", max_shard_bytes=8 << 20),
        lambda: zeepo.load_safetensors(model, f"{folder}/shards"),
        lambda: session.export(f"{folder}/again.safetensors"),
    )]
is_same = filecmp.cmp(f"{folder}/one.safetensors", f"{folder}/again.safetensors", shallow=False)
print(json.dumps({"growths": growths, "peak": max(peaks), "is_same": is_same}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "depth", "ram"),
    [
        pytest.param(1024, 16, 150 * MiB, id="64MiB"),
        pytest.param(2000, 20, 200 * MiB, id="305MiB"),
    ],
)
def test_growth_is_small_and_the_bits_are_plain_pytorch_s(
    tmp_path: Path, width: int, depth: int, ram: int
) -> None:
    arguments = [str(tmp_path), *map(str, (width, depth, ram))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert max(report["growths"]) < width * width * 4 * depth // 2, report
    assert report["peak"] <= ram, report
    assert report["is_same"], "what was loaded is what was written"

    plain: dict[str, Any] = {}
    exec(COMMON, plain)
    model: nn.Module = plain["build"](width, depth)
    plain["train"](model, torch.optim.SGD(model.parameters(), lr=0.1), width)
    expected = model.state_dict()
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) >= depth // 2
    in_shards = {name: value for path in shards for name, value in load_file(path).items()}
    for loaded in (load_file(tmp_path / "one.safetensors"), in_shards):
        assert loaded.keys() == expected.keys()
        assert [n for n, value in loaded.items() if not torch.equal(value, expected[n])] == []
