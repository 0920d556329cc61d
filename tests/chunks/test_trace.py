"""A forecast is the last step's sequence; the cursor finds its way back when the order changes."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.chunks import trace as trace_module
from zeepo.chunks.trace import Trace

sequences = st.lists(st.integers(0, 6), min_size=1, max_size=25)


def collapse(keys: list[int]) -> list[int]:
    """The same chunk twice in a row counts once."""
    return [key for key, _ in groupby(keys)]


def after_step(keys: list[int]) -> Trace:
    trace = Trace()
    for key in keys:
        trace.access(key)
    trace.end_step()
    return trace


def walked(keys: list[int], steps: int) -> Trace:
    trace = after_step(keys)
    for key in collapse(keys)[:steps]:
        trace.access(key)
    return trace


@given(sequences)
def test_access_tells_repetitions(keys: list[int]) -> None:
    trace = Trace()
    answers = [trace.access(key) for key in keys]
    assert answers == [i == 0 or keys[i - 1] != key for i, key in enumerate(keys)]


@given(sequences, st.data())
def test_next_use_is_the_distance_in_the_repeated_sequence(
    keys: list[int], data: st.DataObject
) -> None:
    """When every step does the same, the forecast is right wherever the step stands."""
    sequence = collapse(keys)
    position = data.draw(st.integers(0, len(sequence)))
    trace = walked(keys, position)
    future = (sequence + sequence)[position : position + len(sequence)]
    for key in range(8):
        expected = future.index(key) if key in sequence else math.inf
        assert trace.next_use(key) == expected


@given(sequences, st.integers(0, 10), st.data())
def test_upcoming_is_sorted_by_next_use(keys: list[int], count: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(collapse(keys))))
    trace = walked(keys, position)
    by_distance = sorted(set(keys), key=trace.next_use)
    assert trace.upcoming(count) == by_distance[:count]


@given(sequences)
def test_first_use_order_ranks_by_first_access(keys: list[int]) -> None:
    order = after_step(keys).first_use_order()
    assert sorted(order, key=order.__getitem__) == list(dict.fromkeys(keys))
    assert order == {key: collapse(keys).index(key) for key in set(keys)}


@given(sequences, sequences)
def test_any_way_through_keeps_the_answers_sane(first: list[int], second: list[int]) -> None:
    """A step that has nothing to do with the last one: distances stay in range, nothing raises."""
    trace = after_step(first)
    length = len(collapse(first))
    for key in second:
        trace.access(key)
        for known in set(first):
            assert 0 <= trace.next_use(known) <= length
        assert sorted(trace.upcoming(100)) == sorted(set(first))
    trace.end_step()
    assert trace.upcoming(100) == list(dict.fromkeys(second))


@given(sequences, sequences)
def test_after_an_access_the_cursor_is_behind_it(first: list[int], second: list[int]) -> None:
    """Whatever the detour: what was just accessed is expected where it comes next, not now."""
    trace = after_step(first)
    sequence = collapse(first)
    for key in second:
        is_new = trace.access(key)
        if is_new and key in sequence and len(sequence) > 1:
            following = {
                sequence[(i + 1) % len(sequence)] for i, k in enumerate(sequence) if k == key
            }
            assert trace.upcoming(1)[0] in following


def test_nothing_is_known_before_the_first_step_ends() -> None:
    trace = Trace()
    trace.access(1)
    assert trace.next_use(1) == math.inf
    assert trace.upcoming(5) == []
    assert trace.first_use_order() == {}


def test_an_empty_step_keeps_the_forecast() -> None:
    trace = after_step([1, 2, 3])
    trace.end_step()
    assert trace.upcoming(3) == [1, 2, 3]


def test_a_new_step_starts_at_the_beginning_of_the_forecast() -> None:
    trace = walked([1, 2, 3, 4], 2)
    trace.end_step()
    assert trace.upcoming(9) == [1, 2]
    assert trace.next_use(1) == 0
    assert trace.next_use(3) == math.inf


def test_a_dropped_layer_is_skipped() -> None:
    """Forward 1 2 3 4, backward 4 3 2 1; this step drops layer 3."""
    trace = after_step([1, 2, 3, 4, 5, 4, 3, 2, 1])
    for key in (1, 2, 4):
        trace.access(key)
    assert trace.upcoming(3) == [5, 4, 3]


def test_resynchronising_prefers_the_place_with_our_past() -> None:
    """After 7 8, chunk 1 is the second 1 of the forecast, although the first one is nearer."""
    trace = after_step([5, 1, 2, 7, 8, 1, 3])
    for key in (7, 8):
        trace.access(key)
    trace.access(1)
    assert trace.upcoming(1) == [3]
    trace = after_step([5, 1, 2, 7, 8, 1, 3, 9, 1, 4])
    trace.access(6)  # unknown: the cursor stays
    assert trace.upcoming(1) == [5]
    trace.access(9)
    trace.access(1)
    assert trace.upcoming(1) == [4]


def test_a_longer_common_past_wins_over_a_shorter_one() -> None:
    """Both 1s follow an 8; only the far one follows 7 8."""
    trace = after_step([0, 8, 1, 2, 7, 8, 1, 3, 7])
    for key in (0, 7):
        trace.access(key)
    trace._cursor = 0  # as if lost: the recording alone decides
    trace.access(8)
    trace._cursor = 0
    trace.access(1)
    assert trace.upcoming(1) == [3]


def test_the_context_counts_even_against_distance() -> None:
    """A jump: both 1s are ahead, the far one has our recent past before it."""
    trace = after_step([0, 1, 2, 3, 4, 6, 4, 1, 5])
    for key in (0, 6, 3):
        trace.access(key)  # the cursor jumps about; what was accessed is remembered
    trace.access(4)
    assert trace.upcoming(1) == [6]
    trace.access(1)  # forecast after "3 4" is 6; the only 1 behind a 4 is the last
    assert trace.upcoming(1) == [5]


def test_between_equal_pasts_the_nearest_ahead_is_taken() -> None:
    trace = after_step([1, 2, 9, 3, 9, 4, 9, 5])
    trace.access(1)
    trace.access(2)
    trace.access(8)
    trace.access(9)
    assert trace.upcoming(1) == [3]


def test_an_evaluation_between_steps_finds_back() -> None:
    forward, backward = [1, 2, 3, 4], [4, 3, 2, 1]
    trace = after_step([*forward, *backward])
    for key in forward:  # evaluation: forward only ...
        trace.access(key)
    for key in forward[:2]:  # ... then training again from the start
        trace.access(key)
    assert trace.upcoming(2) == [3, 4]


def test_the_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step without end the latest accesses are kept."""
    monkeypatch.setattr(trace_module, "MAX_RECORDED", 10)
    trace = after_step(list(range(50)))
    assert trace.upcoming(100) == list(range(40, 50))
