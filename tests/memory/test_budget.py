"""The ledger's limit follows the growth of the process, of the system's needs and of the budget."""

import pytest

from zeepo.memory import budget as budget_module
from zeepo.memory.budget import (
    FIRST_SLACK_BYTES,
    LEAST_SLACK_BYTES,
    SLOW_TO_RISE,
    SYSTEM_MARGIN_BYTES,
    RamBudget,
)
from zeepo.memory.heap import HeapUse
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.units import MiB

RAM = 1000 * MiB
RESERVE = 100 * MiB
FLOOR = 10 * MiB


class Process:
    """A process whose size is told by the test."""

    def __init__(self) -> None:
        self.torch_bytes = 0
        self.free_heap_bytes = 0
        self.in_ledger_bytes = 0
        """The heap's, and counted in the ledger."""
        self.spare_bytes: int | None = None
        self.num_trims = 0
        self.spilled: list[int] = []
        self.ledger = Ledger("ram", RAM)
        self.pool = BufferPool(self.ledger)
        self.budget = RamBudget(
            self.pool,
            RAM,
            RESERVE,
            FLOOR,
            lambda: self.torch_bytes + self.ledger.used_bytes - self.pool.fresh_bytes,
            lambda: 0,
            lambda growth: self.spare_bytes,
        )

    def look(self) -> int:
        self.budget._asked_at = 0.0
        self.budget.look()
        assert self.ledger.limit_bytes is not None
        return self.ledger.limit_bytes

    def look_until_risen(self) -> int:
        """As often as the limit waits before it rises."""
        for _ in range(SLOW_TO_RISE - 1):
            self.look()
        return self.look()

    def heap_use(self) -> HeapUse:
        used = self.torch_bytes + self.in_ledger_bytes - self.free_heap_bytes
        return HeapUse(used, self.free_heap_bytes)

    def trim(self) -> None:
        self.num_trims += 1
        self.torch_bytes -= self.free_heap_bytes
        self.free_heap_bytes = 0

    def spill(self, nbytes: int) -> int:
        self.spilled.append(nbytes)
        self.torch_bytes -= nbytes
        return nbytes


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    one = Process()
    monkeypatch.setattr(budget_module, "give_back_free_memory", one.trim)
    monkeypatch.setattr(budget_module, "heap_use", one.heap_use)
    return one


def test_torch_keeps_its_reserve_however_little_it_takes(process: Process) -> None:
    assert process.look() == RAM - RESERVE
    process.torch_bytes = 20 * MiB
    assert process.look() == RAM - RESERVE


def test_what_torch_takes_is_not_the_ledgers(process: Process) -> None:
    process.look()
    process.torch_bytes = 400 * MiB
    assert process.look() == RAM - 400 * MiB - FIRST_SLACK_BYTES
    process.torch_bytes = 200 * MiB
    process.budget.end_step()
    ready_for_another_rise = RAM - 200 * MiB - RAM // 8
    assert process.look_until_risen() == ready_for_another_rise, "within reason"


def test_what_was_there_before_the_first_look_is_no_rise(process: Process) -> None:
    """The user's model, which is about to be adopted, would be expected to come again."""
    process.torch_bytes = 400 * MiB
    first = process.look()
    process.budget.end_step()
    assert process.look_until_risen() >= first


def test_the_limit_falls_at_once_and_rises_late(process: Process) -> None:
    """What torch takes for each layer and gives back is not the ledger's in between."""
    high = process.look()
    for _ in range(3 * SLOW_TO_RISE):
        process.torch_bytes = 300 * MiB
        low = process.look()
        process.torch_bytes = 100 * MiB
        assert process.look() == low < high
    for _ in range(SLOW_TO_RISE - 2):
        assert process.look() == low
    assert process.look() > low


def test_another_ram_counts_at_once(process: Process) -> None:
    low = process.look()
    process.budget.resize(2 * RAM)
    assert process.ledger.limit_bytes == low + RAM


def test_a_buffer_that_nobody_touched_counts_as_taken(process: Process) -> None:
    process.torch_bytes = 300 * MiB
    before = process.look()
    buffer = process.pool.acquire(64 * MiB, "params")
    assert process.look() == before
    buffer.touched()
    assert process.look() == before


def test_memory_that_becomes_the_ledgers_needs_no_room(process: Process) -> None:
    process.torch_bytes = 300 * MiB
    before = process.look()
    process.budget.hand_over(100 * MiB)
    assert process.ledger.limit_bytes == before + 100 * MiB
    process.torch_bytes -= 100 * MiB
    process.ledger.reserve("grads", 100 * MiB)
    assert process.look() == before + 100 * MiB


def test_the_slack_is_what_torch_took_between_two_looks(process: Process) -> None:
    process.look()
    process.torch_bytes = 120 * MiB
    process.look()
    process.budget.end_step()
    assert process.budget._slack() == 120 * MiB
    process.budget.expect(300 * MiB)
    process.torch_bytes += 310 * MiB
    process.look()
    for _ in range(40):
        process.budget.end_step()
    assert process.budget._slack() < 16 * MiB


def test_only_a_foretold_rise_may_have_more_than_its_share(process: Process) -> None:
    process.budget.ram_bytes = 200 * MiB
    process.look()
    process.torch_bytes = 120 * MiB
    process.look()
    process.budget.end_step()
    assert process.budget._slack() == 25 * MiB
    assert process.budget._spill_slack() == 50 * MiB
    process.budget.prepare_for(60 * MiB)
    assert process.budget._slack() == process.budget._spill_slack() == 60 * MiB
    process.budget.ram_bytes = 400 * MiB
    process.budget.prepare_for(150 * MiB)
    assert process.budget._slack() == process.budget._spill_slack() == 100 * MiB


def test_what_was_foretold_counts_until_two_steps_have_shown_what_is_true(
    process: Process,
) -> None:
    process.look()
    process.budget.prepare_for(60 * MiB)
    process.torch_bytes += 20 * MiB
    process.look()
    process.budget.end_step()
    assert process.budget._slack() == 60 * MiB
    process.budget.end_step()
    assert process.budget._slack() == 20 * MiB


def test_a_system_that_runs_short_gets_the_first_steps_slack(process: Process) -> None:
    process.look()
    for _ in range(3):
        process.budget.end_step()
    assert process.budget._slack() == LEAST_SLACK_BYTES
    process.spare_bytes = 300 * MiB
    process.look()
    assert process.budget._slack() == FIRST_SLACK_BYTES
    process.spare_bytes = 5000 * MiB
    process.look()
    assert process.budget._slack() == LEAST_SLACK_BYTES


def test_the_ledger_keeps_its_floor_however_much_torch_takes(process: Process) -> None:
    process.torch_bytes = 3 * RAM
    assert process.look() == FLOOR


def test_free_heap_memory_goes_before_anything_else(process: Process) -> None:
    process.budget.spill = process.spill
    process.torch_bytes, process.free_heap_bytes = 990 * MiB, 500 * MiB
    assert process.look() == RAM - 490 * MiB - FIRST_SLACK_BYTES
    assert (process.num_trims, process.spilled) == (1, [])


def test_what_was_freed_since_the_heap_was_given_back_goes_too(process: Process) -> None:
    process.torch_bytes, process.free_heap_bytes = 1090 * MiB, 100 * MiB
    process.look()
    process.free_heap_bytes = 300 * MiB  # backward let go of it; the process is no larger
    assert process.look_until_risen() == RAM - 690 * MiB - FIRST_SLACK_BYTES
    assert process.num_trims == 2


def test_gradients_taken_over_by_the_ledger_are_not_mistaken_for_free_memory(
    process: Process,
) -> None:
    process.torch_bytes, process.free_heap_bytes = 1000 * MiB, 100 * MiB
    process.look()
    process.budget.hand_over(200 * MiB)
    grads = process.ledger.reserve("grads", 200 * MiB)
    process.torch_bytes -= 200 * MiB
    process.in_ledger_bytes = 200 * MiB
    process.look()
    grads.release()
    process.in_ledger_bytes = 0
    process.torch_bytes, process.free_heap_bytes = 995 * MiB, 5 * MiB
    process.look()
    assert process.num_trims == 1


def test_activations_go_when_nothing_else_is_left(process: Process) -> None:
    process.budget.spill = process.spill
    process.torch_bytes = 990 * MiB
    process.look()
    assert process.spilled == [990 * MiB + FIRST_SLACK_BYTES - RAM]


def test_what_does_not_help_is_not_tried_again_at_once(process: Process) -> None:
    process.torch_bytes, process.free_heap_bytes = 990 * MiB, 0
    for _ in range(10):
        process.free_heap_bytes = 0
        process.look()
    assert process.num_trims == 0
    assert process.budget.over_bytes == 0
    process.torch_bytes = 1100 * MiB
    process.look()
    assert process.budget.over_bytes == 100 * MiB


def test_a_system_that_runs_short_has_the_last_word(process: Process) -> None:
    process.torch_bytes = 200 * MiB
    process.spare_bytes = 300 * MiB
    slack = FIRST_SLACK_BYTES
    assert process.look() == 500 * MiB - SYSTEM_MARGIN_BYTES - 200 * MiB - slack
    process.spare_bytes = 5000 * MiB
    assert process.look_until_risen() == RAM - 200 * MiB - slack
