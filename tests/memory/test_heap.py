"""Free memory of the heap goes back to the system."""

import subprocess
import sys

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
