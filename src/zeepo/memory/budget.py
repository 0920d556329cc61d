"""Keeps the growth of the process inside `ram` by moving the ledger's limit.

What torch allocates for itself (activations, temporaries, what the C library keeps) is not in the
ledger, but the system counts it. So the process's resident growth is read wherever the engine is
about to need room, the part that is not the ledger's is subtracted from `ram`, and what is left is
the ledger's limit. It falls as forward piles up activations, and what torch had at once in one of
the last steps is left to torch, up to a quarter of `ram`: it takes the same memory again in the
next layer or the next step, and what goes to and fro between torch and the pool by way of the
system has to be cleared each time. That costs as much as reading it from a disk, and many times
more in a virtual machine whose host takes back what its guest does not use.

When the system itself runs short (its free memory, the limit of our cgroup), the budget is what it
can still give, and the same happens.

When torch takes more although the heap keeps more than a share of the budget, that is given back:
torch takes blocks of other sizes then, which fit into none of the free ones and come on top. Not
while torch has so much less than in the last steps that they are among what is left to it, unless
what came after this moment in the last steps (large logits, of which the heap has no blocks) would
not fit beside them.

When memory is short, free heap memory is given back first, then chunks leave (the store's work),
then saved activations are sent down. When all that does not help the process is over its budget,
and `over_bytes` says by how much.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from zeepo.memory.heap import WORTH_TRIMMING_BYTES, KeptMemory
from zeepo.memory.ledger import Reservation
from zeepo.memory.pool import BufferPool
from zeepo.memory.rises import LEDGER_SLACK_SHARE, SPILL_SLACK_SHARE, Moments, Rises
from zeepo.memory.spares import SPARE_TAG
from zeepo.memory.system_room import SystemRoom
from zeepo.memory.unseen import Unseen
from zeepo.units import MiB

SLOW_TO_RISE = 64
"""The limit falls at once and rises after so many looks, except by what torch had at once..."""
STEPS_REMEMBERED = 3
"""...in so many steps, this one among them: each of two optimizers ends one."""
LOOKS_OF_A_STEP = 20_000
"""After so many looks without its end a step counts as over: nobody may train any more."""
LEFT_TO_TORCH_SHARE = 1 / 4
"""Of `ram`, the most that is left to torch because it had it once..."""
WORTH_LEAVING_BYTES = 2 * MiB
"""...and the least: to clear less than a huge page is soon done."""
LEAST_SAVED_SHARE = 1 / 3
"""Of gradients' memory that is kept, the least that torch has less by it: else it is not kept."""
KEPT_SHARE = 1 / 8
"""Of what is allowed, the most that the heap may keep of what was freed when torch takes more: it
is found in pieces, not in the sizes that torch takes, and is missing where chunks should be."""


class RamBudget:
    """The limit of a pool's ledger, as the process grows and shrinks around it."""

    def __init__(
        self,
        pool: BufferPool,
        ram_bytes: int,
        reserve_bytes: int,
        floor_bytes: int,
        growth_bytes: Callable[[], int],
        movable_bytes: Callable[[], int],
        spare_bytes: Callable[[int], int | None],
        peak_growth_bytes: Callable[[], int] = lambda: 0,
        stated_limit: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._pool = pool
        self._ledger = pool.ledger
        self._growth_bytes = growth_bytes
        self._movable_bytes = movable_bytes
        """What could leave the ledger now."""
        self._system = SystemRoom(spare_bytes, stated_limit)
        self._peak_growth_bytes = peak_growth_bytes
        """The most it ever grew by, as the kernel saw it."""
        self._unseen = Unseen(peak_growth_bytes())
        self._reserve_bytes = reserve_bytes
        """Never the ledger's, however little torch takes."""
        self._floor_bytes = floor_bytes
        """Always the ledger's, however much torch takes: little, so that small sessions go on."""
        self._rises = Rises(ram_bytes)
        self._moments = Moments()
        self._last_bytes = 0
        self._kept = KeptMemory(growth_bytes, lambda: pool.mapped_bytes - pool.fresh_bytes)
        self._expected_bytes = 0
        """What torch was said to take since the last look..."""
        self._coming_bytes = 0
        """...and what room is being made for."""
        self._recent_limits: deque[int] = deque(maxlen=SLOW_TO_RISE)
        """Of the ledger without its guests."""
        self._taken_by_step: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        """The most that torch had, with guests, in each step; empty until the first has ended..."""
        self._lent_by_step: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        """...and the most that it would have had when a gradient was made in memory that was kept,
        had that been new."""
        self._may_keep = True
        """Whether memory of gradients is kept."""
        self._num_looks = 0
        """In this step."""
        self.ram_bytes = ram_bytes
        self.peak_bytes = 0
        """The largest growth seen."""
        self.over_bytes = 0
        """The most by which the growth was seen to exceed `ram`."""
        self.spill: Callable[[int], int] | None = None
        """Sends saved activations of so many bytes down; how many really went."""
        self.let_spares_go: Callable[[], int] | None = None
        """Gives back what is kept for gradients to come; how many bytes that was."""

    @property
    def allowed_bytes(self) -> int:
        """The growth that is allowed now: `ram`, or less when the system has not that much."""
        return min(self.ram_bytes, self.ram_bytes if (s := self._system.most_bytes) is None else s)

    @property
    def most_spare_bytes(self) -> int:
        """Of the ledger, what may be kept for gradients to come: as much as would be left to torch
        for them."""
        return int(LEFT_TO_TORCH_SHARE * self.ram_bytes) if self._may_keep else 0

    def note_lent(self, nbytes: int) -> None:
        """A gradient is about to be made in memory that was kept."""
        if self._lent_by_step:
            taken = self._last_bytes + self._ledger.guest_bytes + nbytes
            self._lent_by_step[-1] = max(self._lent_by_step[-1], taken)

    def _judge_keeping(self) -> None:
        """Gradients that come when torch has little else need no room of their own: theirs is what
        is left to torch for another moment (large logits), and kept memory would come on top."""
        lent = self._lent_by_step
        if not self._may_keep or len(lent) < STEPS_REMEMBERED or not all(lent):
            return
        saved_bytes = max(0, max(lent) - max(self._taken_by_step))
        kept_bytes = self._ledger.by_tag().get(SPARE_TAG, 0)
        if saved_bytes < LEAST_SAVED_SHARE * kept_bytes:
            self._may_keep = False
            if self.let_spares_go is not None:
                self.let_spares_go()

    @property
    def left_to_torch_bytes(self) -> int:
        """What torch had at once in the last steps beyond what it has now."""
        taken = self._last_bytes + self._ledger.guest_bytes
        return max(0, max(self._taken_by_step, default=0) - taken)

    def unused_bytes(self) -> int:
        """What the process could still grow by, if torch took nothing more."""
        return self.allowed_bytes - self._growth_bytes() - self._pool.fresh_bytes

    def look(self, use: Hashable | None = None, *, in_backward: bool = False) -> None:
        """Read how large the process is and set the ledger's limit; None: the moment is the one of
        the last look."""
        unmanaged = self._read()
        counts = in_backward and not self._rises.is_first_step
        self._unseen.note(self._peak_growth_bytes(), self.peak_bytes, self.ram_bytes, counts=counts)
        if self._recent_limits:  # at the first look all that was there before seems to be new
            rise_bytes = unmanaged - self._last_bytes - self._expected_bytes
            self._rises.note_rise(rise_bytes)
            self._moments.note_rise(rise_bytes)
        self._expected_bytes = self._coming_bytes
        if use is not None:
            self._moments.arrive(use, in_backward=in_backward)
        if self._keeps_too_much(unmanaged):
            unmanaged = self._trim()
        self._last_bytes = unmanaged
        coming_bytes = self._coming_after_this()
        soon = unmanaged + self._ledger.used_bytes + max(coming_bytes, self._spill_slack())
        if soon > self.allowed_bytes:
            self._last_bytes = unmanaged = self._relieve(unmanaged, coming_bytes)
        taken = unmanaged + self._ledger.guest_bytes
        self._note_taken(taken)
        self._note_had(taken)
        known_limit = max(self._floor_bytes, self.allowed_bytes - taken - coming_bytes)
        self._recent_limits.append(min(self._limit(taken), known_limit))
        self._set_limit()
        self._num_looks += 1
        if self._num_looks >= LOOKS_OF_A_STEP:
            self._begin_step()

    def _coming_after_this(self) -> int:
        """What torch will take before the next look, by what it took in the last steps; at a moment
        that is new the steady limit must do."""
        return self._moments.to_come() or 0

    def _keeps_too_much(self, unmanaged: int) -> bool:
        if not self._kept.is_worth_asking(unmanaged):
            return False
        if self._is_below_left(unmanaged + self._ledger.guest_bytes):
            return False
        return self._kept.find_bytes() > self._may_be_kept_bytes()

    def _is_below_left(self, taken: int) -> bool:
        """Whether to give back what the heap keeps would move no limit: what torch had at once in
        the last steps is left to it anyway, and it takes it again in the next layer."""
        left_bytes = max(self._taken_by_step, default=0) - taken
        return WORTH_TRIMMING_BYTES < left_bytes <= LEFT_TO_TORCH_SHARE * self.ram_bytes

    def _may_be_kept_bytes(self) -> int:
        return max(WORTH_TRIMMING_BYTES, int(KEPT_SHARE * self.allowed_bytes))

    def _note_taken(self, nbytes: int) -> None:
        if self._taken_by_step:
            self._taken_by_step[-1] = max(self._taken_by_step[-1], nbytes)

    def _note_had(self, nbytes: int) -> None:
        """Without what the heap keeps, but with activations that leave because of it. Before the
        first step has ended much seems to be torch's that is not."""
        if self._taken_by_step:
            self._rises.note_had(nbytes)

    def _begin_step(self) -> None:
        self._taken_by_step.append(0)
        self._lent_by_step.append(0)
        self._num_looks = 0

    def _set_limit(self) -> None:
        if self._coming_bytes:
            self._ledger.limit_bytes = self.most_bytes
        else:
            self._ledger.limit_bytes = self._steady_limit() + self._ledger.guest_bytes

    def _raise_limits(self, nbytes: int) -> None:
        """What the last looks found was torch's is the ledger's."""
        self._recent_limits = deque((n + nbytes for n in self._recent_limits), SLOW_TO_RISE)

    def _steady_limit(self) -> int:
        """Of the ledger without its guests, torch having what it had in the last steps."""
        swift = min(self._recent_limits)
        steady = self._limit(max(self._taken_by_step, default=0))
        if swift - steady < WORTH_LEAVING_BYTES:
            return swift
        return max(steady, swift - int(LEFT_TO_TORCH_SHARE * self.ram_bytes))

    def expect(self, nbytes: int) -> None:
        """Torch is about to take so much: `look` must not be surprised."""
        self._expected_bytes = nbytes
        taken = self._last_bytes + self._ledger.guest_bytes + nbytes
        self._note_taken(taken)
        self._note_had(taken)

    @contextmanager
    def expecting(self, nbytes: int) -> Iterator[None]:
        """The limit as it is once torch has taken so much, while room is made for that.

        What is foreseen anyway comes from what is left to torch, so no chunk has to leave: the rise
        is known and ends where rises end, it does not come on top of one that is not.
        """
        if self._last_bytes + self._ledger.used_bytes + nbytes > self.allowed_bytes:
            self._last_bytes = self._relieve(self._last_bytes, nbytes)
        self.expect(nbytes)
        self._coming_bytes = nbytes
        self._set_limit()
        try:
            yield
        finally:
            self._coming_bytes = 0
            self._set_limit()

    @property
    def most_bytes(self) -> int:
        """The limit, if nothing were left to torch that it does not have."""
        taken = self._last_bytes + self._ledger.guest_bytes + self._coming_bytes
        return self._limit(taken, is_most=True) + self._ledger.guest_bytes

    def lend(self, nbytes: int) -> bool:
        """Let the ledger have room that is left to torch, until the next look; False if there is
        not so much."""
        limit_bytes = (self._ledger.limit_bytes or 0) + nbytes
        if limit_bytes > self.most_bytes:
            return False
        self._ledger.limit_bytes = limit_bytes
        return True

    def admit(self, tag: str, nbytes: int) -> Reservation:
        """Memory of torch's that the process has already is the ledger's until it is freed."""
        self._last_bytes -= nbytes
        return self._ledger.admit(tag, nbytes)

    def keep_room_of(self, guests: Iterable[Reservation]) -> None:
        """Their room is not torch's: they go because it is needed, or their memory is kept."""
        if nbytes := sum(guest.stay() for guest in guests):
            self._raise_limits(nbytes)

    def hand_over(self, nbytes: int) -> None:
        """Memory of torch's that the process has already is about to become the ledger's."""
        self._last_bytes -= nbytes
        self._raise_limits(nbytes)
        self._ledger.limit_bytes = max(self._ledger.limit_bytes or 0, self.most_bytes)

    def resize(self, ram_bytes: int) -> None:
        """Another budget from now on."""
        self.ram_bytes = ram_bytes
        self._unseen.forget(self._peak_growth_bytes())
        self._recent_limits.clear()
        self.look()

    def prepare_for(self, rise_bytes: int, most_bytes: int = 0) -> None:
        """Torch is foretold to take so much between two looks, and to have so much at most beside
        what it has now, or will have at least."""
        has_bytes = max(self._last_bytes, self._reserve_bytes) if most_bytes else 0
        self._rises.foretell(rise_bytes, has_bytes + most_bytes)

    def end_step(self) -> None:
        """What the last steps showed is what the next is prepared for."""
        self._rises.end_step()
        self._moments.end_step()
        self._judge_keeping()
        self._begin_step()

    def _read(self) -> int:
        growth = self._growth_bytes()
        self._system.ask(growth)
        self.peak_bytes = max(self.peak_bytes, growth)
        self.over_bytes = max(self.over_bytes, growth - self.ram_bytes)
        return growth - (self._ledger.used_bytes - self._pool.fresh_bytes)

    def _slack(self) -> int:
        return self._slack_within(LEDGER_SLACK_SHARE)

    def _spill_slack(self) -> int:
        return self._slack_within(SPILL_SLACK_SHARE)

    def _slack_within(self, share: float) -> int:
        return self._rises.slack_bytes(share, self.ram_bytes, is_short=self._is_short)

    @property
    def _is_short(self) -> bool:
        """Whether the system has less than `ram`."""
        return self.allowed_bytes < self.ram_bytes

    def _limit(self, taken: int, *, is_most: bool = False) -> int:
        """Less what torch has taken and may take before the next look; at least its reserve. With
        `is_most`, less of what was only seen once."""
        soon = taken + self._rise_to_come(self._slack(), taken, is_whole=not is_most)
        unseen_bytes = 0 if is_most else self._unseen.nbytes
        left_bytes = self.allowed_bytes - max(soon, self._reserve_bytes) - unseen_bytes
        return max(self._floor_bytes, left_bytes)

    def _soon_taken(self, unmanaged: int) -> int:
        """What torch may have at the next look, of which activations can be sent down."""
        taken = unmanaged + self._ledger.guest_bytes
        return unmanaged + self._rise_to_come(self._spill_slack(), taken)

    def _rise_to_come(self, slack_bytes: int, taken: int, *, is_whole: bool = False) -> int:
        if self._is_short:
            return slack_bytes
        return self._rises.still_to_come(slack_bytes, taken, is_whole=is_whole)

    def _relieve(self, unmanaged: int, coming_bytes: int) -> int:
        """Memory is short: give back what nobody uses, before anything has to move.

        What torch had at once in the last steps it will take again: a share is kept for it, unless
        what comes at once does not fit beside that.
        """
        taken = unmanaged + self._ledger.guest_bytes
        takes_more = taken > max(self._taken_by_step, default=0)
        is_missing = self._missing(unmanaged) > 0
        if is_missing and self.let_spares_go is not None and self.let_spares_go():
            unmanaged = self._read()
            is_missing = self._missing(unmanaged) > 0
        soon = unmanaged + self._ledger.used_bytes + coming_bytes
        is_wanted = takes_more or is_missing or soon > self.allowed_bytes
        if is_wanted or not self._is_below_left(taken):
            kept = self._kept.find_bytes()
            if kept >= (WORTH_TRIMMING_BYTES if is_wanted else self._may_be_kept_bytes()):
                unmanaged = self._trim()
        self._note_had(unmanaged + self._ledger.guest_bytes)
        missing = self._missing(unmanaged)
        if missing > 0 and self.spill is not None and self.spill(missing):
            unmanaged = self._trim()
        return unmanaged

    def _missing(self, unmanaged: int) -> int:
        """What no chunk can make room for."""
        fixed = self._ledger.used_bytes - self._movable_bytes()
        return fixed + self._soon_taken(unmanaged) - self.allowed_bytes

    def _trim(self) -> int:
        self._kept.give_back()
        return self._read()
