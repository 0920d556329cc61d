"""How much torch may take before the process is looked at again. Pure.

What it took at most between two looks, in the last steps, it may take again: that is the slack.
Such a rise was a part of the most that torch had in one of those steps, so where torch has nearly
as much already, the rise is over: it ends at that most and an eighth, or at what torch was foretold
to have at most, if that is more. When torch has clearly more than ever, nothing is known any more,
and the whole slack counts for the rest of the step. A batch that is larger than those of the last
steps may therefore take up to a rise more than was kept free for it.

What comes and goes between two looks is not seen by them (backward of a loss holds three times its
logits, and touches no parameter meanwhile). It is foretold, where a forward and backward could be
run on shapes; what was more than that, `unseen` finds out.

Large rises come at the same moments of each step: after the head of a language model was leased
come its logits. What came after a moment in the last steps is known when it comes again, in time to
empty the heap, whose free blocks would otherwise come on top.
"""

from collections import deque
from collections.abc import Hashable

from zeepo.units import MiB

FIRST_SLACK_BYTES = 64 * MiB
LEAST_SLACK_BYTES = 8 * MiB
RISES_KEPT = 8
"""Steps that are remembered: not every batch is the largest."""
STEPS_TO_GO_BY = 2
"""What was foretold counts until so many steps have shown what is true: the first makes states."""
LEDGER_SLACK_SHARE = 1 / 8
"""Of `ram`, the most that the ledger leaves free for what torch takes between two looks..."""
SPILL_SLACK_SHARE = 1 / 4
"""...and the most that saved activations do: they are what such a rise is added to."""
GROWTH_SHARE = 1 / 8
"""Of the most that torch had in the last steps, or was foretold to have, what it may have more in
the next (and the allocator beside it): rises end there..."""
KNOWN_SHARE = 1 / 32
"""...unless it has more by this part, and so more than is known."""


class Rises:
    """What the last steps took between two looks, and what they had at most."""

    def __init__(self, ram_bytes: int) -> None:
        self._slack_bytes = min(FIRST_SLACK_BYTES, int(LEDGER_SLACK_SHARE * ram_bytes))
        self._first_slack_bytes = self._slack_bytes
        """Until there are steps to go by."""
        self._foretold_bytes = 0
        self._foretold_most_bytes = 0
        self._recent_rises: deque[int] = deque(maxlen=RISES_KEPT)
        self._recent_mosts: deque[int] = deque(maxlen=RISES_KEPT)
        self._rise_bytes = 0
        self._most_bytes = 0

    def note_rise(self, nbytes: int) -> None:
        """Torch took so much between two looks."""
        self._rise_bytes = max(self._rise_bytes, nbytes)

    def note_had(self, nbytes: int) -> None:
        """Torch had so much, before anything was sent down because of it."""
        self._most_bytes = max(self._most_bytes, nbytes)

    def foretell(self, rise_bytes: int, most_bytes: int) -> None:
        """What the last steps had says nothing: torch is foretold to take so much at once, and to
        have so much at most."""
        self._foretold_bytes = rise_bytes
        self._foretold_most_bytes = most_bytes
        self._recent_rises.clear()
        self._recent_mosts.clear()
        self._slack_bytes = self._first_slack_bytes = max(LEAST_SLACK_BYTES, rise_bytes)

    def end_step(self) -> None:
        """What the last steps showed is what the next is prepared for."""
        self._recent_rises.append(self._rise_bytes)
        if self._most_bytes:
            self._recent_mosts.append(self._most_bytes)
        self._slack_bytes = max(LEAST_SLACK_BYTES, *self._recent_rises)
        if len(self._recent_rises) < STEPS_TO_GO_BY:
            self._slack_bytes = max(self._slack_bytes, self._first_slack_bytes)
        self._rise_bytes = self._most_bytes = 0

    @property
    def is_first_step(self) -> bool:
        """It makes states and loads code, which says nothing of those to come."""
        return not self._recent_rises

    def slack_bytes(self, share: float, ram_bytes: int, *, is_short: bool) -> int:
        """A rise that was seen gets a share of `ram`; one that was foretold, and so is in the least
        budget, may have more, and all it needs until there are steps to go by. When the system runs
        short there is more, as in the first steps: it gives no notice."""
        slack_bytes = max(self._slack_bytes, self._first_slack_bytes if is_short else 0)
        most = max(FIRST_SLACK_BYTES, int(SPILL_SLACK_SHARE * ram_bytes))
        is_known = len(self._recent_rises) >= STEPS_TO_GO_BY
        foretold = min(most, self._foretold_bytes) if is_known else self._foretold_bytes
        return min(slack_bytes, max(foretold, int(share * ram_bytes)))

    def still_to_come(self, slack_bytes: int, taken: int, *, is_whole: bool = False) -> int:
        """Of the slack, what may still come where torch has so much; `is_whole`, of the largest
        rise instead, as far as it is known where it ends."""
        if len(self._recent_mosts) < STEPS_TO_GO_BY:
            return slack_bytes
        known = max(*self._recent_mosts, self._foretold_most_bytes)
        if max(taken, self._most_bytes) > (1 + KNOWN_SHARE) * known:
            return slack_bytes
        end = int((1 + GROWTH_SHARE) * known) + LEAST_SLACK_BYTES
        largest_bytes = self._slack_bytes if is_whole else slack_bytes
        return min(largest_bytes, max(LEAST_SLACK_BYTES, end - taken))


BETWEEN_USES = "between uses"
LOOKS_KEPT_APART = 1000
"""After so many looks since a use all are the same moment."""


class Moments:
    """What came after each moment, in the last steps: after the use of a chunk, or after the n-th
    look since then."""

    def __init__(self) -> None:
        self._now: tuple[Hashable, int] | None = None
        """None between steps: the user may do what he likes."""
        self._recent: dict[tuple[Hashable, int], int] = {}
        """Moment -> the largest rise after it, in up to so many steps as are remembered..."""
        self._before: dict[tuple[Hashable, int], int] = {}
        """...and in as many before those."""
        self._num_steps = 0

    def note_rise(self, nbytes: int) -> None:
        """So much came since the last look."""
        if self._now is not None:
            self._recent[self._now] = max(nbytes, self._recent.get(self._now, 0))

    def arrive(self, use: Hashable, *, in_backward: bool) -> None:
        """At the use of a chunk, or between uses."""
        if use != BETWEEN_USES:
            self._now = (use, in_backward), 0
        elif self._now is not None:
            self._now = self._now[0], min(self._now[1] + 1, LOOKS_KEPT_APART)

    def to_come(self) -> int | None:
        """What is known to come after this moment; None if it is a new one."""
        if self._now is None:
            return None
        known = [seen[self._now] for seen in (self._recent, self._before) if self._now in seen]
        return int((1 + GROWTH_SHARE) * max(known)) if known else None

    def end_step(self) -> None:
        self._now = None
        self._num_steps += 1
        if self._num_steps % RISES_KEPT == 0:
            self._before, self._recent = self._recent, {}
