"""The ledger's limit follows the growth of the process, of the system's needs and of the budget."""

import pytest

from zeepo.memory import budget as budget_module
from zeepo.memory import heap as heap_module
from zeepo.memory.budget import (
    KEPT_SHARE,
    LEFT_TO_TORCH_SHARE,
    SLOW_TO_RISE,
    STEPS_REMEMBERED,
    RamBudget,
)
from zeepo.memory.heap import WORTH_TRIMMING_BYTES, HeapUse
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.memory.rises import (
    BETWEEN_USES,
    FIRST_SLACK_BYTES,
    GROWTH_SHARE,
    LEAST_SLACK_BYTES,
    RISES_KEPT,
    STEPS_TO_GO_BY,
)
from zeepo.memory.spares import SPARE_TAG
from zeepo.memory.system_room import SYSTEM_MARGIN_BYTES
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
        self.older_heap_bytes = 0
        """The heap's, and no growth: from before the process was watched."""
        self.mapped_bytes = 0
        """Of torch's, not the heap's."""
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

    def look(self, use: object = BETWEEN_USES) -> int:
        self.budget._system.asked_at = 0.0
        self.budget.look(use)
        assert self.ledger.limit_bytes is not None
        return self.ledger.limit_bytes

    def look_until_risen(self) -> int:
        """As often as the limit waits before it rises."""
        for _ in range(SLOW_TO_RISE - 1):
            self.look()
        return self.look()

    def heap_use(self) -> HeapUse:
        growth = self.torch_bytes + self.in_ledger_bytes - self.free_heap_bytes - self.mapped_bytes
        return HeapUse(growth + self.older_heap_bytes, self.free_heap_bytes)

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
    monkeypatch.setattr(heap_module, "give_back_free_memory", one.trim)
    monkeypatch.setattr(heap_module, "heap_use", one.heap_use)
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


def grow(process: Process, torch_bytes: int) -> int:
    """Little by little: no rise of its own."""
    while process.torch_bytes < torch_bytes:
        process.torch_bytes += LEAST_SLACK_BYTES
        process.look()
    return process.look()


def test_what_a_step_takes_for_a_while_is_left_to_torch_in_the_next(process: Process) -> None:
    before, after = [], []
    for _ in range(6):
        process.torch_bytes = 96 * MiB
        before.append(process.look_until_risen())
        after.append(grow(process, 296 * MiB))
        process.budget.end_step()
    low = RAM - 296 * MiB - LEAST_SLACK_BYTES
    assert before[0] == before[1] > after[0]  # not known yet
    assert before[-2:] == after[-2:] == [low, low]
    process.torch_bytes = 96 * MiB
    for _ in range(STEPS_REMEMBERED):
        risen = process.look_until_risen()
        process.budget.end_step()
    assert risen == low + 200 * MiB


def test_more_than_a_part_of_ram_is_not_left_idle(process: Process) -> None:
    process.torch_bytes = 100 * MiB
    high = process.look()
    process.budget.end_step()
    process.torch_bytes = 700 * MiB
    low = process.look()
    process.torch_bytes = 100 * MiB
    assert process.look() == low
    assert process.look_until_risen() == high - int(LEFT_TO_TORCH_SHARE * RAM) > low


def steady(process: Process) -> int:
    """After steps in which torch had 296 MiB at most, 96 at this moment."""
    for _ in range(4):
        process.torch_bytes = 96 * MiB
        process.look_until_risen()
        grow(process, 296 * MiB)
        process.budget.end_step()
    process.torch_bytes = 96 * MiB
    low = process.look_until_risen()
    assert process.budget.most_bytes == low + 200 * MiB
    return low


def test_what_is_left_to_torch_is_room_for_what_is_expected(process: Process) -> None:
    low = steady(process)
    with process.budget.expecting(250 * MiB):
        assert process.ledger.limit_bytes == low - 50 * MiB
    assert process.ledger.limit_bytes == low - 50 * MiB


def test_what_is_expected_does_not_come_on_top_of_the_slack(process: Process) -> None:
    """Nobody has to leave for a gradient that torch had room for in every step, however large a
    rise comes at another moment."""
    steps_with_a_rise(process, 400 * MiB, 500 * MiB)
    process.torch_bytes = 400 * MiB
    low = process.look_until_risen()
    assert process.budget.most_bytes < low + 90 * MiB
    with process.budget.expecting(90 * MiB):
        assert (process.ledger.limit_bytes or 0) >= low


def test_what_is_left_to_torch_is_lent_once(process: Process) -> None:
    low = steady(process)
    assert process.budget.lend(150 * MiB)
    assert not process.budget.lend(51 * MiB)
    assert process.ledger.limit_bytes == low + 150 * MiB
    assert process.look() == low
    with process.budget.expecting(MiB):
        assert not process.budget.lend(1)


def test_the_room_of_a_guest_that_has_to_leave_is_not_torchs(process: Process) -> None:
    process.torch_bytes = 300 * MiB
    before = process.look()
    guests = [process.budget.admit("grads", 20 * MiB) for _ in range(10)]
    process.torch_bytes -= 200 * MiB
    assert process.look() == before + 200 * MiB
    process.budget.keep_room_of(guests)
    for guest in guests:
        guest.release()
    assert process.look() == before + 200 * MiB
    assert process.ledger.guest_bytes == process.ledger.used_bytes == 0


def test_what_torch_had_once_is_forgotten_without_steps(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "LOOKS_OF_A_STEP", 2 * SLOW_TO_RISE)
    low = steady(process)
    for _ in range(4 * STEPS_REMEMBERED):
        process.look_until_risen()
    assert process.look() == low + 200 * MiB


def test_free_memory_beyond_torchs_share_is_given_back(process: Process) -> None:
    """One batch was much larger than all others."""
    process.torch_bytes = 100 * MiB
    process.look()
    for _ in range(2):
        process.budget.end_step()
    buffer = process.pool.acquire(400 * MiB, "params")
    buffer.touched()
    process.torch_bytes = 590 * MiB
    process.look()
    process.budget.end_step()
    assert process.num_trims == 0
    process.free_heap_bytes = 450 * MiB
    process.look()
    assert process.num_trims == 1


def test_the_heap_keeps_a_share_however_much_room_there_is(process: Process) -> None:
    """Blocks of other sizes come on top of the free ones, and the ledger would lose their room."""
    process.torch_bytes = 200 * MiB
    process.look()
    limits = []
    for _ in range(8):
        process.budget.end_step()
        for _ in range(4):  # freed in pieces, taken anew
            process.torch_bytes += 32 * MiB
            process.free_heap_bytes += 32 * MiB
            limits.append(process.look())
    most = 200 * MiB + KEPT_SHARE * RAM + 32 * MiB
    assert min(limits) >= RAM - most - FIRST_SLACK_BYTES
    assert process.num_trims == 8, "each time when an eighth of ram was kept"
    assert process.spilled == []


def test_free_memory_is_seen_beside_what_the_heap_had_before(process: Process) -> None:
    """The user loaded data before zeepo was imported."""
    process.older_heap_bytes = 2000 * MiB
    process.torch_bytes = 200 * MiB
    process.look()
    process.torch_bytes += 200 * MiB
    process.look()
    process.torch_bytes += 200 * MiB
    process.free_heap_bytes = 200 * MiB
    process.look()
    assert process.num_trims == 1


def test_free_memory_is_seen_after_memory_of_another_kind_went(process: Process) -> None:
    """A copy that was there when free memory was given back is not there for good."""
    process.torch_bytes = 200 * MiB
    process.look()
    process.torch_bytes += 300 * MiB
    process.mapped_bytes = 300 * MiB
    process.free_heap_bytes = 140 * MiB
    process.look()
    assert process.num_trims == 1
    process.torch_bytes -= 300 * MiB
    process.mapped_bytes = 0
    for _ in range(2):  # it went, and what torch takes next is seen
        process.torch_bytes += 50 * MiB
        process.look()
    process.torch_bytes += 140 * MiB
    process.free_heap_bytes = 140 * MiB
    process.look()
    assert process.num_trims == 2


def test_the_heap_keeps_less_when_the_system_has_less(process: Process) -> None:
    process.torch_bytes = 100 * MiB
    process.look()
    process.spare_bytes = 200 * MiB
    process.torch_bytes += 60 * MiB
    process.free_heap_bytes = 50 * MiB
    process.look()
    assert process.num_trims == 1
    assert process.budget.allowed_bytes < RAM // 2


def test_the_heap_is_asked_only_when_torch_has_taken_more(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def heap_use() -> HeapUse:
        asked.append(process.torch_bytes)
        return process.heap_use()

    process.torch_bytes = 300 * MiB
    process.look()
    monkeypatch.setattr(heap_module, "heap_use", heap_use)
    for _ in range(100):
        process.torch_bytes = 300 * MiB + WORTH_TRIMMING_BYTES - MiB
        process.look()
        process.torch_bytes = 300 * MiB
        process.look()
    assert asked == []
    process.torch_bytes = 300 * MiB + WORTH_TRIMMING_BYTES
    process.look()
    assert asked


def test_a_gradient_that_goes_soon_leaves_its_room_to_torch(process: Process) -> None:
    process.torch_bytes = 100 * MiB
    process.look()
    process.budget.end_step()
    limits = []
    for _ in range(3):
        process.torch_bytes = 300 * MiB
        process.look()
        guest = process.budget.admit("grads", 200 * MiB)
        process.torch_bytes = 100 * MiB
        assert process.look() == limits[-1] + 200 * MiB if limits else True
        guest.release()
        limits += [process.ledger.limit_bytes, process.look()]
    assert len(set(limits)) == 1
    assert limits[0] == RAM - 300 * MiB - FIRST_SLACK_BYTES
    assert process.budget._rises._rise_bytes <= 200 * MiB


def test_a_limit_that_changes_is_asked_for_at_once(process: Process) -> None:
    process.spare_bytes = 5000 * MiB
    process.torch_bytes = 300 * MiB
    process.look()
    limits = [b"1"]
    process.budget._system._stated_limit = lambda: limits[-1]
    process.budget.look()
    process.spare_bytes = 100 * MiB
    process.budget.look()
    assert process.budget.allowed_bytes == RAM, "asked a moment ago"
    limits.append(b"2")
    process.budget.look()
    assert process.budget.allowed_bytes < RAM


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


def steps_with_a_rise(process: Process, low: int, high: int, num_steps: int = 4) -> None:
    """Each goes from low to high at once, and back."""
    for _ in range(num_steps):
        process.torch_bytes = low
        process.look()
        process.torch_bytes = high
        process.look()
        process.torch_bytes = low
        process.look_until_risen()
        process.budget.end_step()


def test_a_rise_ends_at_what_torch_had_at_most_and_an_eighth(process: Process) -> None:
    steps_with_a_rise(process, 200 * MiB, 304 * MiB)
    most = 304 * MiB * 9 // 8 + LEAST_SLACK_BYTES
    assert process.budget._slack() == 104 * MiB
    assert process.look() == RAM - most  # between: both say so
    process.torch_bytes = 304 * MiB
    assert process.look() == RAM - most
    process.torch_bytes = 310 * MiB  # a little more than ever
    assert process.look() == RAM - most


def test_once_torch_has_more_than_ever_the_largest_rise_may_come_again(process: Process) -> None:
    steps_with_a_rise(process, 200 * MiB, 304 * MiB)
    process.torch_bytes = 320 * MiB
    assert process.look() == RAM - 320 * MiB - 104 * MiB
    process.torch_bytes = 300 * MiB  # and for the rest of the step
    assert process.look_until_risen() == RAM - 320 * MiB - 104 * MiB


class GPTSteps:
    """Layers leave free blocks to the heap, which logits do not fit into; chunks take all the room
    that there is."""

    def __init__(self, process: Process, logits_bytes: int) -> None:
        self.process = process
        self.logits_bytes = logits_bytes
        self.heap_bytes = 0
        self.most_grown = 0
        process.budget.prepare_for(logits_bytes)
        process.look()
        self.chunks = process.ledger.reserve("params", 0)

    def look(self, use: object = BETWEEN_USES) -> None:
        process = self.process
        grown = process.torch_bytes + process.ledger.used_bytes
        self.most_grown = max(self.most_grown, grown)
        process.look(use)
        self.chunks.release()
        self.chunks = process.ledger.reserve("params", process.ledger.limit_bytes or 0)

    def run(self, num_steps: int) -> int:
        """How often the heap was emptied in a step."""
        num_trims = self.process.num_trims
        self.most_grown = 0
        for _ in range(num_steps):
            self._step()
        return (self.process.num_trims - num_trims) // num_steps

    def _step(self) -> None:
        process = self.process
        for _ in range(8):
            process.torch_bytes = 200 * MiB + process.free_heap_bytes
            self.look("layer")
            process.torch_bytes = 200 * MiB + self.heap_bytes
            process.free_heap_bytes = self.heap_bytes
            self.look()
        self.look("head")
        process.torch_bytes += self.logits_bytes
        self.look()
        process.torch_bytes -= self.logits_bytes
        process.budget.end_step()


def test_the_heap_is_empty_when_a_rise_comes_that_does_not_fit_beside_it(process: Process) -> None:
    steps = GPTSteps(process, 450 * MiB)
    steps.run(20)
    steps.heap_bytes = 100 * MiB
    assert steps.run(4) == 1, "before the head, not at every layer"
    assert steps.most_grown <= RAM
    most = int((1 + GROWTH_SHARE) * (200 + 450) * MiB) + LEAST_SLACK_BYTES
    assert process.ledger.limit_bytes == RAM - most


def test_a_rise_of_one_use_is_not_expected_at_others(process: Process) -> None:
    steps = GPTSteps(process, 450 * MiB)
    steps.run(4)
    process.look("layer")
    assert process.budget._moments.to_come() == 0
    process.look()
    assert process.budget._moments.to_come() == 0
    process.look("head")
    assert process.budget._moments.to_come() == int((1 + GROWTH_SHARE) * 450 * MiB)
    process.look("another")
    assert process.budget._moments.to_come() is None


def test_a_rise_is_forgotten_after_steps_without_it(process: Process) -> None:
    steps = GPTSteps(process, 450 * MiB)
    steps.run(3)
    for number in range(RISES_KEPT):  # a little less each time
        steps.logits_bytes = 450 * MiB - number
        steps.run(1)
        process.look("head")
        assert (process.budget._moments.to_come() or 0) > 450 * MiB
    steps.logits_bytes = 10 * MiB
    steps.run(2 * RISES_KEPT)
    process.look("head")
    assert process.budget._moments.to_come() == int((1 + GROWTH_SHARE) * 10 * MiB)


def test_what_is_foretold_is_left_free_though_no_look_sees_it(process: Process) -> None:
    """Backward of a loss takes more than forward, and gives it back before anybody looks."""
    process.torch_bytes = RESERVE
    process.look()
    process.budget.prepare_for(300 * MiB, 500 * MiB)
    steps_with_a_rise(process, 150 * MiB, 450 * MiB)
    process.torch_bytes = 450 * MiB
    foretold = int((1 + GROWTH_SHARE) * (RESERVE + 500 * MiB)) + LEAST_SLACK_BYTES
    assert process.look() == RAM - foretold


def test_the_kernel_tells_what_no_look_saw_and_did_not_fit(process: Process) -> None:
    peaks = [0]
    process.budget._peak_growth_bytes = lambda: peaks[-1]
    steps_with_a_rise(process, 150 * MiB, 400 * MiB)
    before, most_before = process.look(), process.budget.most_bytes
    peaks.append(RAM + 70 * MiB)
    process.budget.look("head", in_backward=True)
    assert process.look_until_risen() == before - 70 * MiB
    for _ in range(2 * RISES_KEPT):  # nothing is seen any more because it fits: it is not forgotten
        steps_with_a_rise(process, 150 * MiB, 400 * MiB, num_steps=1)
    assert process.look_until_risen() == before - 70 * MiB
    assert process.budget.most_bytes == most_before, "nothing is refused because of it"
    peaks.append(RAM + 80 * MiB)
    process.budget.look("head", in_backward=True)
    assert process.look() == before - 80 * MiB
    peaks.append(5 * RAM)
    process.budget.look("head", in_backward=True)
    assert process.look() == before - RAM // 8
    process.budget.resize(RAM)
    assert process.look() == before


def test_what_happens_outside_backward_says_nothing_of_it(process: Process) -> None:
    """The user loads something between steps, or the first step makes states."""
    peaks = [0]
    process.budget._peak_growth_bytes = lambda: peaks[-1]
    process.look()
    peaks.append(RAM + 10 * MiB)
    process.budget.look("head", in_backward=True)
    process.budget.end_step()
    peaks.append(RAM + 70 * MiB)
    process.look()
    process.budget.look("head", in_backward=True)
    assert process.budget._unseen.nbytes == 0


def test_what_is_announced_finds_the_heap_empty(process: Process) -> None:
    process.torch_bytes = 200 * MiB
    for _ in range(2):
        process.look()
        process.budget.end_step()
    process.ledger.reserve("params", 500 * MiB)
    process.torch_bytes = process.free_heap_bytes = 120 * MiB
    process.torch_bytes += 200 * MiB
    process.look()
    assert process.num_trims == 0
    with process.budget.expecting(100 * MiB):
        assert process.num_trims == 0
    with process.budget.expecting(200 * MiB):
        assert process.num_trims == 1


def test_what_went_down_in_time_counts_as_what_torch_had(process: Process) -> None:
    """Activations leave because a rise will come: that is the most torch had, not what was left."""
    fixed = process.ledger.reserve("params", 300 * MiB)
    process.budget.spill = process.spill
    process.budget.prepare_for(220 * MiB)
    process.look()
    for _ in range(3 * RISES_KEPT):
        process.torch_bytes = 100 * MiB
        for _ in range(100):
            process.torch_bytes += 8 * MiB
            process.look()
        process.torch_bytes += 220 * MiB
        process.look()
        process.torch_bytes = 100 * MiB
        process.look_until_risen()
        process.budget.end_step()
    assert process.budget.over_bytes == 0
    fixed.release()


def test_a_system_that_runs_short_keeps_the_whole_slack(process: Process) -> None:
    steps_with_a_rise(process, 200 * MiB, 304 * MiB)
    process.spare_bytes = 500 * MiB
    process.torch_bytes = 304 * MiB
    limit = process.look()
    assert limit <= process.budget.allowed_bytes - 304 * MiB - 104 * MiB


def test_what_the_heap_keeps_of_each_layer_stays(process: Process) -> None:
    """Below what is left to torch anyway it is in nobody's way, and would have to be cleared."""
    steps_with_a_rise(process, 200 * MiB, 440 * MiB)
    assert process.num_trims == 0
    for _ in range(4):  # layers
        process.torch_bytes = 400 * MiB
        process.free_heap_bytes = 0
        process.look()
        process.free_heap_bytes = 180 * MiB
        process.torch_bytes += 16 * MiB
        process.look()
    assert process.num_trims == 0
    process.torch_bytes = 440 * MiB  # here it is on top of the most
    process.look()
    assert process.num_trims == 1


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
    assert process.budget._slack() == process.budget._spill_slack() == 150 * MiB
    for _ in range(STEPS_TO_GO_BY):
        process.torch_bytes = 120 * MiB
        process.look()
        process.torch_bytes += 150 * MiB
        process.look()
        process.budget.end_step()
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


def test_what_is_kept_for_gradients_goes_before_activations(process: Process) -> None:
    kept = [300 * MiB]

    def let_spares_go() -> int:
        freed = sum(kept)
        kept.clear()
        process.torch_bytes -= freed
        return freed

    process.budget.spill = process.spill
    process.budget.let_spares_go = let_spares_go
    process.torch_bytes = 500 * MiB
    process.look()
    process.budget.end_step()
    process.look()
    assert kept  # there is room for it
    process.torch_bytes = 990 * MiB
    process.look()
    assert not kept
    assert process.spilled == []


def test_room_left_to_torch_is_what_it_had_and_has_not(process: Process) -> None:
    process.budget.end_step()
    process.torch_bytes = 500 * MiB
    process.look()
    assert process.budget.left_to_torch_bytes == 0
    process.torch_bytes = 200 * MiB
    process.look()
    assert process.budget.left_to_torch_bytes == 300 * MiB
    process.torch_bytes = 700 * MiB
    process.look()
    assert process.budget.left_to_torch_bytes == 0


@pytest.mark.parametrize(
    ("other_bytes", "is_kept"), [(0, True), (100 * MiB, True), (300 * MiB, False)]
)
def test_gradients_memory_is_kept_where_torch_has_less_by_it(
    process: Process, other_bytes: int, is_kept: bool
) -> None:
    """Torch has 200 MiB when a gradient of 150 MiB is made, and so much more at another moment."""
    let_go: list[int] = []

    def let_spares_go() -> int:
        let_go.append(150 * MiB)
        return 150 * MiB

    process.budget.let_spares_go = let_spares_go
    with process.ledger.reserve(SPARE_TAG, 150 * MiB):
        for _ in range(4):
            assert process.budget.most_spare_bytes
            process.budget.end_step()
            process.torch_bytes = 200 * MiB
            process.look()
            process.budget.note_lent(150 * MiB)
            process.torch_bytes = 200 * MiB + other_bytes
            process.look()
        process.budget.end_step()
        assert bool(process.budget.most_spare_bytes) is is_kept
        assert bool(let_go) is not is_kept
