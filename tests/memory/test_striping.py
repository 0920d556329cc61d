"""Striping and file space: every block in exactly one place, in proportion, without overlap."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.memory.space import FileSpace
from zeepo.memory.striping import StripePattern, stripe_order

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 500), st.integers(0, 400))
def test_slots_are_dense_and_in_block_order(
    weights: list[float], phase: int, num_blocks: int
) -> None:
    pattern = StripePattern(weights)
    next_slot = [0] * len(weights)
    for block in range(num_blocks):
        directory, slot = pattern.locate(phase, block)
        assert slot == next_slot[directory]
        next_slot[directory] += 1
    assert pattern.num_slots(phase, num_blocks) == tuple(next_slot)


@given(WEIGHTS)
def test_shares_follow_the_weights(weights: list[float]) -> None:
    order = stripe_order(weights)
    assert set(order) == set(range(len(weights)))  # Everyone takes part.
    total = sum(weights)
    shares = [weight / total * len(order) for weight in weights]
    # Rounding moves a share by less than one entry, unless small ones were raised to one entry.
    raised = sum(max(0.0, 1 - share) for share in shares)
    for directory, share in enumerate(shares):
        assert share - 1 - raised <= order.count(directory) <= max(1, math.ceil(share))


def test_equal_weights_take_turns() -> None:
    assert stripe_order([2.5, 2.5, 2.5]) == (0, 1, 2)
    assert stripe_order([7.0]) == (0,)


def test_the_cycle_is_spread_evenly() -> None:
    order = stripe_order([1, 3])
    assert order.count(1) == 3 * order.count(0)
    doubled = order * 2
    for start in range(len(order)):
        assert 2 <= doubled[start : start + 4].count(1) <= 4


@given(WEIGHTS, st.lists(st.integers(1, 3), min_size=200, max_size=200))
def test_many_small_extents_share_as_one_large_one(weights: list[float], sizes: list[int]) -> None:
    pattern = StripePattern(weights)
    phase, totals = 0, [0] * len(weights)
    for size in sizes:
        for directory, count in enumerate(pattern.num_slots(phase, size)):
            totals[directory] += count
        phase = (phase + size) % pattern.period
    assert tuple(totals) == pattern.num_slots(0, sum(sizes))


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [float("inf")], [float("nan"), 1.0]])
def test_bad_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        stripe_order(bad)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_file_space_never_overlaps(steps: list[tuple[int, int]]) -> None:
    space = FileSpace()
    held: list[tuple[int, int]] = []
    for action, number in steps:
        if action == 0 and held:
            offset, nbytes = held.pop(number % len(held))
            space.free(offset, nbytes)
        elif action == 1:
            for start, stop in space.backed_ranges():
                space.make_hole(start, stop)
            assert space.backed_bytes == 0
        else:
            reused = space.can_reuse(number)
            backed_bytes = space.backed_bytes
            held.append((space.allocate(number), number))
            assert space.backed_bytes == (backed_bytes - number if reused else backed_bytes)
        used = sorted((offset, offset + nbytes) for offset, nbytes in held if nbytes)
        used += space.backed_ranges()
        used.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(used))
        assert all(stop <= space.end for _, stop in used)
        assert space.used_bytes == sum(nbytes for _, nbytes in held)


def test_file_space_merges_what_was_freed() -> None:
    space = FileSpace()
    offsets = [space.allocate(10) for _ in range(4)]
    for offset in (offsets[0], offsets[2], offsets[1]):
        space.free(offset, 10)
    assert space.backed_ranges() == [(0, 30)]
    assert space.allocate(30) == 0
    assert space.end == 40
    with pytest.raises(ValueError, match="not one of the ranges"):
        space.make_hole(0, 10)
