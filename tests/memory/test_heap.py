"""Free memory of the heap goes back to the system, when that is of use."""

import subprocess
import sys

import pytest

from zeepo.memory import heap
from zeepo.memory.heap import HeapKeeper
from zeepo.units import MiB

FRAGMENTED = """
import torch
from zeepo.memory.heap import give_back_free_memory
from zeepo.planner.machine import resident_growth_bytes
torch.empty(4 << 20).fill_(1)  # 16 MiB, freed: from now on such blocks come from the heap
blocks = [torch.ones(1 << 20) for _ in range(40)]
last = torch.ones(1 << 20)
del blocks
before = resident_growth_bytes()
give_back_free_memory()
print(before - resident_growth_bytes())
"""


def test_free_blocks_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 100 * MiB


def test_what_does_not_help_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, tries = [0], [0]

    def trim() -> None:
        tries[0] += 1

    monkeypatch.setattr(heap, "give_back_free_memory", trim)
    keeper = HeapKeeper(100 * MiB, lambda: resident[0])
    keeper.check()
    assert tries == [0]
    for resident[0] in range(101 * MiB, 1100 * MiB, MiB):
        keeper.check()
    assert tries == [5]


def test_what_helps_is_done_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, tries = [0], [0]

    def trim() -> None:
        tries[0] += 1
        resident[0] = 50 * MiB

    monkeypatch.setattr(heap, "give_back_free_memory", trim)
    keeper = HeapKeeper(100 * MiB, lambda: resident[0])
    for _ in range(4):
        resident[0] = 150 * MiB
        keeper.check()
    assert tries == [4]
