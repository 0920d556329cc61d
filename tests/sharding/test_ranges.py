"""Ranges: every byte has one owner, in the order of the ranks, as nearly as the weights say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.engine.team import weights_of_ram
from zeepo.errors import ConfigError
from zeepo.sharding.ranges import ALIGNMENT_BYTES, Range, split

sizes = st.integers(0, 1 << 20)
weights = st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda ws: sum(ws) > 0.01)


@given(sizes, weights)
def test_every_byte_has_one_owner(nbytes: int, given_weights: list[float]) -> None:
    ranges = split(nbytes, given_weights)
    assert len(ranges) == len(given_weights)
    assert ranges[0].low == 0
    assert ranges[-1].high == nbytes
    for one, next_one in pairwise(ranges):
        assert one.low <= one.high == next_one.low
        assert one.high % ALIGNMENT_BYTES == 0 or one.high == nbytes


@given(sizes, st.integers(1, 9))
def test_equal_weights_give_nearly_equal_parts(nbytes: int, num_ranks: int) -> None:
    for part in split(nbytes, [1.0] * num_ranks):
        assert abs(part.nbytes - nbytes / num_ranks) <= ALIGNMENT_BYTES + 1


@given(sizes, weights)
def test_parts_follow_the_weights(nbytes: int, given_weights: list[float]) -> None:
    total = sum(given_weights)
    for part, weight in zip(split(nbytes, given_weights), given_weights, strict=True):
        assert abs(part.nbytes - nbytes * weight / total) <= ALIGNMENT_BYTES + 2


def test_boundaries_only_where_allowed() -> None:
    ranges = split(1000, [1.0, 1.0, 1.0], at=[100, 600])
    assert [part.high for part in ranges] == [100, 600, 1000]
    assert [part.nbytes for part in split(1000, [1.0, 1.0], at=[])] == [1000, 0]


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [1.0, -1.0]])
def test_senseless_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ConfigError, match="ranks cannot share by weights"):
        split(100, bad)


def test_intersection_is_empty_outside() -> None:
    part = Range(100, 200)
    assert part.intersect(150, 300) == Range(150, 200)
    assert part.intersect(0, 50).nbytes == 0
    assert part.intersect(300, 400).nbytes == 0


def test_weights_follow_ram_when_every_rank_was_given_another() -> None:
    assert weights_of_ram([None, None]) == (1.0, 1.0)
    assert weights_of_ram([4, None, 2]) == (1.0, 1.0, 1.0)
    assert weights_of_ram([4, 4]) == (1.0, 1.0)
    assert weights_of_ram([6, 2, 4]) == (6.0, 2.0, 4.0)
