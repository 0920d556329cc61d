"""What is said of ranks that are silent, slow, leaving, or waiting for us."""

from __future__ import annotations

import pytest

from zeepo import events
from zeepo.errors import RankError
from zeepo.sharding import watchdog as module
from zeepo.sharding.watchdog import Phase, Wait, Watchdog

BACKWARD, STEP, CHANGE = 3, 4, 5


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    """Rank 0 of three, whose own thread does not tick: `passes` does."""
    dog = Watchdog(0, (1, 2), 20.0, 100.0, (BACKWARD, STEP))
    dog.close()
    return dog


def passes(watchdog: Watchdog, clock: Clock, seconds: float, *heard: int) -> None:
    """Time goes by in small steps, with the ranks that are heard of."""
    for _ in range(round(seconds * 2)):
        clock.now += 0.5
        watchdog._last_tick = clock.now
        for peer in heard:
            watchdog.heard(peer)


def test_a_silent_rank_is_named_once_and_then_given_up(
    watchdog: Watchdog, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    given_up: list[int] = []
    watchdog.give_up = lambda rank, why: given_up.append(rank)
    watchdog.heard(1, (7, 3))
    wait = Wait("layers.2", words=lambda peer: f"layers.2: layers.2.weight of {peer}")
    passes(watchdog, clock, 4.5, 2)
    watchdog.check(wait, {1})
    assert capsys.readouterr().err == ""
    for _ in range(3):
        passes(watchdog, clock, 1.0, 2)
        watchdog.check(wait, {1})
    told = capsys.readouterr().err
    assert told.count("has not been heard of for 5.5 s; it was in optimizer.step, step 7") == 1
    assert "rank 0 waits for rank 1 (layers.2: layers.2.weight of 1)" in told
    passes(watchdog, clock, 14.0, 2)
    with pytest.raises(RankError, match=r"rank 1 .*has not been heard of for 21\.5 s"):
        watchdog.check(wait, {1})
    assert given_up == [1]


def test_who_was_stopped_itself_blames_nobody(
    watchdog: Watchdog, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = Wait("layers.2")
    clock.now += 50.0
    watchdog.check(wait, {1})
    assert "heard" not in capsys.readouterr().err


def test_waits_that_exclude_each_other_are_named(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.told(STEP, 5)
    wait = Wait("optimizer.step", (STEP, 5))
    watchdog.peer_waits(1, Wait("the end of backward", (BACKWARD, 6)))
    watchdog.check(wait, {1, 2})
    passes(watchdog, clock, 2.0, 1, 2)
    with pytest.raises(
        RankError, match=r"rank 0 is at optimizer\.step 5 while rank 1 is at the end of backward 6"
    ):
        watchdog.check(wait, {1, 2})


def test_a_wait_for_what_we_have_told_is_none_of_them(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.told(BACKWARD, 6)
    watchdog.told(STEP, 5)
    watchdog.peer_waits(1, Wait("the end of backward", (BACKWARD, 6)))
    wait = Wait("optimizer.step", (STEP, 5))
    passes(watchdog, clock, 2.0, 1, 2)
    watchdog.check(wait, {1, 2})  # ours is on its way
    watchdog.peer_waits(1, None)
    watchdog.peer_waits(2, Wait("optimizer.step", (STEP, 5)))
    passes(watchdog, clock, 2.0, 1, 2)
    watchdog.check(wait, {1})


def test_who_closes_waits_for_the_others_to_close(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.position = (4, Phase.CLOSING)
    watchdog.leaving[2] = "it raised ValueError"
    wait = Wait("close", (7, 1))
    watchdog.peer_waits(1, Wait("the end of backward", (BACKWARD, 6)))
    passes(watchdog, clock, 2.0, 1, 2)
    watchdog.check(wait, {1, 2})


def test_who_leaves_tells_no_more_facts(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.leaving[2] = "it raised ValueError: bad"
    bytes_of_it = Wait("layers.1")
    watchdog.check(bytes_of_it, {2})  # it may still give them
    with pytest.raises(RankError, match=r"rank 2 \(optimizer\.step 5\), but it raised ValueError"):
        watchdog.check(Wait("optimizer.step", (STEP, 5)), {1, 2})
    passes(watchdog, clock, 6.0, 1, 2)
    with pytest.raises(RankError, match="it raised ValueError: bad"):
        watchdog.check(bytes_of_it, {2})


def test_a_circle_of_waits_is_named_when_nothing_moves(watchdog: Watchdog, clock: Clock) -> None:
    wait = Wait("layers.1")
    watchdog.peer_waits(1, Wait("layers.2"))
    watchdog.peer_waits(2, Wait("layers.3"))
    passes(watchdog, clock, 15.0, 1, 2)
    watchdog.num_moved += 1
    watchdog.check(wait, {1})
    passes(watchdog, clock, 15.0, 1, 2)
    watchdog.check(wait, {1})
    passes(watchdog, clock, 6.0, 1, 2)
    with pytest.raises(RankError, match=r"rank 0: layers\.1; rank 1: layers\.2; rank 2: layers\.3"):
        watchdog.check(wait, {1})


def test_a_rank_that_lives_but_does_not_come_is_given_up_late(
    watchdog: Watchdog, clock: Clock
) -> None:
    wait = Wait("the end of backward", (BACKWARD, 6))
    passes(watchdog, clock, 99.0, 1, 2)
    watchdog.check(wait, {1})
    passes(watchdog, clock, 2.0, 1, 2)
    with pytest.raises(RankError, match=r"rank 1 .*lives but does not come"):
        watchdog.check(wait, {1})


def test_a_straggler_is_an_event_each_time_and_a_line_now_and_then(
    watchdog: Watchdog, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[events.Event] = []
    events.listen(heard.append)
    try:
        for _ in range(6):
            wait = Wait("the end of backward", (BACKWARD, 6))
            passes(watchdog, clock, 2.0, 1, 2)
            watchdog.over(wait, {2})
        quick = Wait("the end of backward", (BACKWARD, 7))
        passes(watchdog, clock, 0.5, 1, 2)
        watchdog.over(quick, {2})
    finally:
        events.stop_listening(heard.append)
    assert [event["seconds_in_all"] for event in heard] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert {event["straggler"] for event in heard} == {2}
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 2
    assert "rank 0 waited 2.0 s (2.0 s in all) for rank 2 (the end of backward 6)" in lines[0]
