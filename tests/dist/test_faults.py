"""A rank is killed, stopped, slow, wrong, or does something else than the others.

Nobody hangs, the rank is named in time, and nothing is left on the disk.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.faults import Nursery, Rank, scratch_left, sockets_of

SLOW = pytest.mark.slow
SECONDS = 15.0
"""Within which survivors have ended: a moment, on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory


def ended_with(ranks: list[Rank], code: int = 1, seconds: float = SECONDS) -> list[str]:
    """What each rank said at last, having ended by then with that exit code."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        is_over = rank.wait(max(0.0, deadline - time.monotonic()))
        assert is_over, f"rank {rank.number} hangs: {rank.whereabouts.read()}\n{rank.stderr}"
        assert rank.exit_code == code, rank.stderr
    return [rank.stderr.strip().split("\n")[-1] for rank in ranks]


@pytest.mark.parametrize(
    ("num_ranks", "phase"),
    [
        (2, "forward"),
        (3, "reduction"),
        (2, "closing"),
        *(
            pytest.param(num_ranks, phase, marks=SLOW)
            for num_ranks in (2, 3)
            for phase in ("outside", "backward", "optimizer.step")
        ),
    ],
)
def test_survivors_name_a_killed_rank(
    nursery: Nursery, tmp_path: Path, disk: Path, num_ranks: int, phase: str
) -> None:
    steps = 3 if phase == "closing" else 10_000
    ranks = nursery.start(
        num_ranks, tmp_path / "run", "train", stage=3, disk=str(disk), num_steps=steps
    )
    victim, *survivors = ranks[1], *ranks[:1], *ranks[2:]
    victim.wait_until(3, phase)
    victim.signal(signal.SIGKILL)
    for said in ended_with(survivors):
        assert "RankError" in said
        assert "rank 1" in said
        if phase in ("forward", "backward", "reduction"):
            assert "blocks." in said or "the end of" in said  # the unit, or the meeting place
    ended_with([victim], -signal.SIGKILL)
    assert scratch_left(disk) == []
    assert sockets_of([rank.pid for rank in ranks]) == 0


@pytest.mark.slow
def test_training_goes_on_when_a_stopped_rank_wakes_up(
    nursery: Nursery, tmp_path: Path, disk: Path
) -> None:
    options = {"stage": 3, "num_steps": 12, "disk": str(disk)}
    plain = nursery.start(2, tmp_path / "plain", "train", **options)
    ended_with(plain, 0, 60.0)
    ranks = nursery.start(2, tmp_path / "run", "train", **options)
    ranks[1].wait_until(4, "backward")
    ranks[1].signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5.0 + SECONDS
    while "rank 0 waits for rank 1" not in ranks[0].stderr and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks[1].signal(signal.SIGCONT)
    ended_with(ranks, 0, 60.0)
    assert "which has not been heard of for 5." in ranks[0].stderr
    assert "rank 0 waits" not in ranks[1].stderr
    assert "has not been heard of" not in ranks[1].stderr  # it slept itself
    for before, after in zip(plain, ranks, strict=True):
        assert after.result["losses"] == before.result["losses"]
        assert after.result["values"] == before.result["values"]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=SLOW)])
def test_ranks_that_wait_for_each_other_say_so(
    nursery: Nursery, tmp_path: Path, num_ranks: int
) -> None:
    ranks = nursery.start(num_ranks, tmp_path / "run", "one_backward_more", stage=3)
    for said in ended_with(ranks, seconds=60.0):
        assert "optimizer.step 2" in said
        assert "the end of backward 3" in said
        assert "equally often" in said


def test_a_rank_that_closes_early_is_named(nursery: Nursery, tmp_path: Path, disk: Path) -> None:
    ranks = nursery.start(2, tmp_path / "run", "close_early", stage=3, disk=str(disk))
    (said,) = ended_with(ranks[:1], seconds=60.0)
    assert "rank 0 is at the end of backward 3 while rank 1 is at close" in said
    ended_with(ranks[1:], 0)  # its close was in order: all have their values
    assert scratch_left(disk) == []


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("script", 1, "its script ended with ValueError: bad data in row 7"),
        ("with", 1, "it raised ValueError: bad data in row 7"),
        pytest.param("exit", 3, "its script ended without closing its session", marks=SLOW),
        pytest.param("stay", None, "it raised ValueError: bad data in row 7", marks=SLOW),
    ],
)
def test_a_mistake_on_one_rank_ends_the_others(
    nursery: Nursery, tmp_path: Path, disk: Path, how: str, code: int | None, reason: str
) -> None:
    ranks = nursery.start(2, tmp_path / "run", "mistake", stage=3, disk=str(disk), how=how)
    (said,) = ended_with(ranks[:1], seconds=60.0)
    assert "RankError: rank 0 waits for rank 1" in said
    assert reason in said
    if code is not None:
        ended_with(ranks[1:], code)
    assert scratch_left(disk) == []


def test_a_slow_rank_is_named_with_what_it_costs(nursery: Nursery, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    options = {"stage": 1, "seconds": 2.5, "events": str(path)}
    ranks = nursery.start(2, tmp_path / "run", "slow_rank", **options)
    ended_with(ranks, 0, 60.0)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    (event,) = [e for e in told if e["event"] == "straggler" and e["seconds"] > 2.0]
    assert (event["rank"], event["straggler"]) == (0, 1)
    assert event["what"] == "the end of backward"
    assert 2.0 < event["seconds"] <= event["seconds_in_all"]
    assert "for rank 1 (the end of backward 3)" in ranks[0].stderr
