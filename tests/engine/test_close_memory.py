"""Closing takes no more memory than training may: measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.small import run_program

MEASURED = """
import gc, json, os, sys, threading, time
import torch, zeepo
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(15)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()

def digest(model, optimizer):
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    return [hash(t.detach().numpy().tobytes()) for t in tensors]

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10

class Peak(threading.Thread):
    def run(self):
        self.bytes = 0
        self.going = True
        while self.going:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.001)

disk, ram = sys.argv[1], 160 << 20
warm = nn.Linear(4, 4)
warm_optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
warm(torch.ones(1, 4)).sum().backward()
warm_optimizer.step()
start = anonymous()
with zeepo.lazy(ram="32MiB", disk=disk):
    model, optimizer = build()
peak = Peak()
peak.start()
session = zeepo.init(model, optimizer, ram=ram, disk=disk)
train(model, optimizer, range(2))
before_close = peak.bytes - start
peak.bytes = 0
clock = time.perf_counter()
session.close()
seconds = time.perf_counter() - clock
peak.going = False
peak.join()
result = dict(
    ram=ram, while_training=before_close, while_closing=peak.bytes - start,
    after=anonymous() - start, seconds=seconds, files=os.listdir(disk),
)
after_close = digest(model, optimizer)
result["after_reading"] = anonymous() - start
train(model, optimizer, range(2, 3))
after_more = digest(model, optimizer)
mapped = open("/proc/self/maps").read().count("whole.bin")
del model, optimizer, session
gc.collect()
result["maps"] = [mapped, open("/proc/self/maps").read().count("whole.bin")]
model, optimizer = build()
train(model, optimizer, range(2))
result["same_after_close"] = digest(model, optimizer) == after_close
train(model, optimizer, range(2, 3))
result["same_after_more"] = digest(model, optimizer) == after_more
print(json.dumps(result))
"""


@pytest.mark.slow
def test_closing_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    """240 MB of training state, gradients included, under 160 MiB; as the system counts, not we."""
    done = run_program(MEASURED, tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["while_training"] <= result["ram"]
    assert result["while_closing"] <= result["ram"]
    assert result["after"] <= result["ram"]
    assert result["after_reading"] <= result["ram"]
    assert result["same_after_close"]
    assert result["same_after_more"]
    assert result["files"] == []
    assert result["maps"][0] > 20
    assert result["maps"][1] == 0
