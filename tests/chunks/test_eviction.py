"""Who leaves: the furthest next use first, clean before dirty, no more than needed."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from zeepo.chunks.eviction import Candidate, choose_victims

candidate_lists = st.lists(
    st.builds(
        Candidate,
        key=st.integers(0, 50),
        nbytes=st.integers(0, 100),
        next_use=st.one_of(st.integers(0, 9).map(float), st.just(math.inf)),
        is_clean=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.key,
)
thresholds = st.sampled_from([-1.0, 0.0, 2.0, 5.0, math.inf])


def distance(candidate: Candidate) -> float:
    """How far a candidate counts as being: to let a changed one go costs twice as much."""
    return candidate.next_use if candidate.is_clean else candidate.next_use / 2


@given(candidate_lists, st.integers(0, 400), thresholds)
def test_enough_comes_free_or_nothing_is_chosen(
    candidates: list[Candidate], needed: int, later_than: float
) -> None:
    by_key = {c.key: c for c in candidates}
    allowed = sum(c.nbytes for c in candidates if c.next_use > later_than)
    victims = choose_victims(candidates, needed, later_than=later_than)
    if victims is None:
        assert allowed < needed
        return
    assert allowed >= needed
    assert len(set(victims)) == len(victims)
    assert all(by_key[k].next_use > later_than and by_key[k].nbytes > 0 for k in victims)
    freed = [by_key[k].nbytes for k in victims]
    assert sum(freed) >= needed
    assert sum(freed[:-1]) < needed or not victims, "the last victim was not needed"


@given(candidate_lists, st.integers(1, 400), thresholds)
def test_nobody_who_stays_should_have_gone_first(
    candidates: list[Candidate], needed: int, later_than: float
) -> None:
    victims = choose_victims(candidates, needed, later_than=later_than)
    if victims is None:
        return
    by_key = {c.key: c for c in candidates}
    order = [by_key[k] for k in victims]
    for first, second in itertools.pairwise(order):
        assert distance(first) >= distance(second)
        if distance(first) == distance(second):
            assert first.is_clean or not second.is_clean
    staying = [
        c for c in candidates if c.key not in victims and c.nbytes > 0 and c.next_use > later_than
    ]
    for kept in staying:
        for gone in order:
            assert distance(kept) <= distance(gone)
            if distance(kept) == distance(gone):
                assert gone.is_clean or not kept.is_clean


@given(candidate_lists, st.integers(0, 400), st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(
    candidates: list[Candidate], needed: int, random: object
) -> None:
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_victims(candidates, needed) == choose_victims(shuffled, needed)


def test_the_furthest_goes_first() -> None:
    near, far, never = (
        Candidate(1, 10, 2.0, True),
        Candidate(2, 10, 7.0, False),
        Candidate(3, 10, math.inf, False),
    )
    assert choose_victims([near, far, never], 25) == [3, 2, 1]
    assert choose_victims([near, far, never], 20) == [3, 2]
    assert choose_victims([near, far, never], 31) is None


def test_a_changed_one_goes_only_when_it_is_twice_as_far() -> None:
    clean = Candidate(1, 10, 10.0, True)
    near, far = Candidate(2, 10, 19.0, False), Candidate(3, 10, 21.0, False)
    assert choose_victims([clean, near], 10) == [1]
    assert choose_victims([clean, far], 10) == [3]


def test_between_equals_the_clean_one_goes() -> None:
    assert choose_victims([Candidate(1, 9, 4.0, False), Candidate(2, 9, 4.0, True)], 1) == [2]


def test_a_prefetch_does_not_push_out_what_is_needed_before_it() -> None:
    candidates = [Candidate(1, 9, 3.0, True), Candidate(2, 9, 4.0, True)]
    assert choose_victims(candidates, 1, later_than=3.0) == [2]
    assert choose_victims(candidates, 1, later_than=4.0) is None
    assert choose_victims(candidates, 10, later_than=3.0) is None


def test_a_use_right_now_may_still_have_to_go() -> None:
    assert choose_victims([Candidate(1, 9, 0.0, True)], 1) == [1]


def test_nothing_needed_nobody_goes() -> None:
    assert choose_victims([Candidate(1, 9, math.inf, True)], 0) == []
    assert choose_victims([], 0) == []
    assert choose_victims([], 1) is None
