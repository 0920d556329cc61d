"""Which chunks stay in RAM, and how much room they get."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.chunks.choosing import Link, Movable, choose, seconds_of_step
from zeepo.chunks.residents import USUAL_ON_THEIR_WAY, Residents

NONE: frozenset[int] = frozenset()
UNKNOWN = Link(0.0, 0)


def chunks(count: int, nbytes: int = 10, num_transfers: int = 3) -> list[Movable]:
    return [Movable(key, nbytes, (float(key),) * num_transfers) for key in range(count)]


def after_step(residents: Residents, known: list[Movable], *, limit: int, leased: int = 10) -> int:
    residents.note_lease(NONE, leased, limit)
    residents.end_step(known, 0)
    return sum(chunk.nbytes for chunk in known if chunk.key in residents.keys)


def test_room_that_no_moment_needs_is_used() -> None:
    known = chunks(100)
    assert after_step(Residents(), known, limit=500) == 500 - 10 - USUAL_ON_THEIR_WAY * 10


def test_least_budgets_keep_nothing() -> None:
    assert after_step(Residents(), chunks(100), limit=USUAL_ON_THEIR_WAY * 10) == 0


def test_the_least_limit_of_a_step_counts() -> None:
    residents, known = Residents(), chunks(100)
    residents.note_lease(NONE, 10, 200)
    least = 200 - 10 - USUAL_ON_THEIR_WAY * 10
    assert [after_step(residents, known, limit=900) for _ in range(3)] == [
        least,
        least,  # what the last step but one showed counts too
        900 - 10 - USUAL_ON_THEIR_WAY * 10,
    ]


def test_a_large_lease_and_a_low_limit_at_different_moments_do_not_add_up() -> None:
    residents, known = Residents(), chunks(100)
    residents.note_lease(NONE, 300, 900)
    residents.note_lease(NONE, 20, 500)
    residents.end_step(known, 40)
    kept = sum(chunk.nbytes for chunk in known if chunk.key in residents.keys)
    assert kept == 500 - 20 - 40 - USUAL_ON_THEIR_WAY * 10


def test_what_is_leased_at_the_worst_moment_may_stay_beside_what_fits_into_it() -> None:
    """A large head: its weight is in use where the step needs the most."""
    residents, known = Residents(), [*chunks(100), Movable(100, 200, (50.0,) * 3)]
    residents.note_lease(frozenset({100}), 700, 1000)
    residents.note_lease(frozenset({3, 4}), 300, 1000)
    residents.end_step(known, 0)
    on_their_way = USUAL_ON_THEIR_WAY * 10
    assert 100 in residents.keys
    assert 10 * (len(residents.keys) - 1) == 1000 - 700 - on_their_way

    residents.note_lease(NONE, 700, 1000)  # as much is needed where it is not in use
    for _ in range(2):
        residents.end_step(known, 0)
        residents.note_lease(NONE, 700, 1000)
    kept = sum(chunk.nbytes for chunk in known if chunk.key in residents.keys)
    assert kept == 1000 - 700 - on_their_way


def test_what_had_to_leave_makes_the_set_smaller_for_many_steps() -> None:
    residents, known = Residents(), chunks(100)
    before = after_step(residents, known, limit=600)
    for key in list(residents.keys)[:20]:
        residents.note_eviction(key, 10)
        residents.note_eviction(key, 10)  # again and again: it counts once
    assert after_step(residents, known, limit=600) == before - 200
    residents.note_eviction(1000, 10_000)  # not one of the set
    sizes = [after_step(residents, known, limit=600) for _ in range(64)]
    assert sizes == sorted(sizes)
    assert before - 200 <= sizes[0] < before
    assert before - 40 <= sizes[-1] <= before


def test_small_changes_of_the_limit_change_nothing() -> None:
    residents, known = Residents(), chunks(100)
    after_step(residents, known, limit=600)
    kept = residents.keys
    for limit in (590, 610, 575):
        after_step(residents, known, limit=limit)
        assert residents.keys is kept


def test_chunks_that_are_gone_are_no_longer_in_the_set() -> None:
    residents = Residents()
    after_step(residents, chunks(100), limit=600)
    fewer = chunks(100)[50:]
    for _ in range(2):
        after_step(residents, fewer, limit=600)
    assert residents.keys <= {chunk.key for chunk in fewer}


def test_more_transfers_come_first_and_are_spread_over_the_step() -> None:
    parameters = [Movable(key, 10, (key, 120 - key, 120 - key)) for key in range(60)]
    states = [Movable(key, 10, (120 - key % 60,) * 2) for key in range(60, 180)]
    chosen = sorted(choose(states + parameters, {NONE: 200}, 100, UNKNOWN))
    assert len(chosen) == 20
    assert max(chosen) < 60
    gaps = [b - a for a, b in pairwise(chosen)]
    assert max(gaps) <= 6
    assert len(choose(states + parameters, {NONE: 700}, 100, UNKNOWN) & set(range(60))) >= 55


def test_a_burst_is_levelled_first() -> None:
    """What moves within a moment is what training waits for, though others move more often."""
    layers = [Movable(key, 10, (key, 120 - key, 120 - key)) for key in range(60)]
    embedding = [Movable(key, 10, (121.0, 121.0)) for key in range(60, 100)]
    chosen = choose(layers + embedding, {NONE: 300}, 100, UNKNOWN)
    assert len(chosen & set(range(60, 100))) >= 29
    left = choose(layers + embedding, {NONE: 600}, 100, UNKNOWN)
    assert 30 < len(left & set(range(60, 100))) < 40  # the rest is as level as the layers
    assert len(left) == 60


def test_many_chunks_in_one_moment_are_chosen_from_at_once() -> None:
    """A step with one long pause has all its transfers in two slices; looking at each of them again
    after every choice would take minutes."""
    known = [Movable(key, 10, (key / 20_000, 300.0 + key / 20_000)) for key in range(20_000)]
    for link in (UNKNOWN, Link(1000.0, 1000)):
        assert len(choose(known, {NONE: 100_000}, 100, link)) == 10_000


def test_where_the_disk_has_little_time_left_more_transfers_come_first() -> None:
    """A burst is not worth its bytes when all that moves is waited for anyway."""
    layers = [Movable(key, 10, (key, 120 - key, 120 - key)) for key in range(60)]
    embedding = [Movable(key, 10, (121.0, 121.0)) for key in range(60, 100)]

    def chosen_layers(bytes_per_second: float) -> int:
        link = Link(bytes_per_second, 20)
        return len(choose(layers + embedding, {NONE: 300}, 100, link) & set(range(60)))

    moved_bytes = sum(chunk.nbytes * len(chunk.moments) for chunk in layers + embedding)
    assert chosen_layers(0.0) <= 1
    assert chosen_layers(2 * moved_bytes / 121) <= 15
    assert chosen_layers(0.2 * moved_bytes / 121) == 30
    assert chosen_layers(100 * moved_bytes / 121) <= 1


def test_a_step_is_as_long_as_what_it_computes_or_moves() -> None:
    ample, scarce = Link(1000.0, 1000), Link(1.0, 1000)
    assert seconds_of_step([10] * 8, 16.0, ample) == pytest.approx(16.0)
    assert seconds_of_step([10] * 8, 16.0, scarce) == pytest.approx(80.0)
    burst = [0] * 6 + [80, 80]
    assert seconds_of_step(burst, 16.0, Link(20.0, 80)) == pytest.approx(16.0)  # read ahead
    assert seconds_of_step(burst, 16.0, Link(20.0, 0)) > 17.0


def test_another_speed_changes_the_set() -> None:
    layers = [Movable(key, 10, (key, 120 - key, 120 - key)) for key in range(60)]
    embedding = [Movable(key, 10, (121.0, 121.0)) for key in range(60, 100)]
    residents = Residents()

    def kept_layers(bytes_per_second: float) -> int:
        residents.note_lease(NONE, 0, 400)
        residents.end_step(layers + embedding, 0, bytes_per_second)
        return len(residents.keys & set(range(60)))

    level = kept_layers(40.0)
    assert level <= 15
    assert kept_layers(45.0) == level
    assert kept_layers(4.0) > 20


def test_without_times_more_transfers_come_first() -> None:
    known = [Movable(key, 10, (0.0,) * (1 + key % 3)) for key in range(90)]
    assert {key % 3 for key in choose(known, {NONE: 300}, 100, UNKNOWN)} == {2}


def test_two_optimizers_that_step_in_turns_share_one_set() -> None:
    residents, known = Residents(), chunks(100)
    after_step(residents, known[:50], limit=560)
    kept = residents.keys
    assert len(kept) == 47
    for half in (known[50:], known[:50]) * 3:
        after_step(residents, half, limit=560)
        assert residents.keys == kept


def test_a_few_large_chunks_among_many_small_ones_can_be_read_ahead() -> None:
    known = [Movable(key, 1, (key,) * 3) for key in range(100)]
    known += [Movable(key, 100, (key,) * 2) for key in range(100, 120)]
    assert after_step(Residents(), known, limit=600, leased=100) == 600 - 100 - 4 * 100


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3)), max_size=30),
    st.integers(0, 600),
    st.integers(0, 60),
)
def test_never_more_than_the_room(sizes: list[tuple[int, int]], room: int, largest: int) -> None:
    known = [Movable(key, nbytes, (key,) * count) for key, (nbytes, count) in enumerate(sizes)]
    chosen = choose(known, {NONE: room}, largest, UNKNOWN)
    kept = [chunk for chunk in known if chunk.key in chosen]
    assert sum(chunk.nbytes for chunk in kept) <= room
    assert all(chunk.nbytes <= largest for chunk in kept)
