"""Free memory of the heap goes back to the system."""

import subprocess
import sys

from zeepo.units import MiB

FRAGMENTED = """
import torch
from zeepo.memory.heap import FreedMemory, give_back_free_memory
from zeepo.planner.machine import resident_growth_bytes
torch.empty(4 << 20).fill_(1)  # 16 MiB, freed: from now on such blocks come from the heap
blocks = [torch.ones(1 << 20) for _ in range(40)]
last = torch.ones(1 << 20)
freed = FreedMemory(100 << 20)
freed.look()
del blocks{kept}
before = resident_growth_bytes()
{give_back}
print(before - resident_growth_bytes())
"""


def given_back(give_back: str, kept: str = "") -> int:
    script = FRAGMENTED.format(give_back=give_back, kept=kept)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_free_blocks_are_given_back() -> None:
    assert given_back("give_back_free_memory()") > 100 * MiB


def test_much_that_was_freed_is_given_back_and_little_is_kept() -> None:
    assert given_back("freed.look()") > 100 * MiB
    assert given_back("freed.look()", kept="[:20]") < 16 * MiB
