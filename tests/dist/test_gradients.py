"""Gradients between backward and step on several ranks: read, held, clipped and changed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.gradient_programs import (
    differing,
    hold_addresses,
    norm_on_one_rank,
    norms_after_changes,
    read_while_others_change,
    told_by_events,
    unscaled_by_the_step,
)
from tests.dist.ranks import Ranks

SLOW = pytest.mark.slow
STAGES = [3, pytest.param(1, marks=SLOW)]


@pytest.mark.parametrize("stage", STAGES)
def test_norms_are_of_what_is_there_now(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    expected = ranks.run(2, norms_after_changes, None, None)
    actual = ranks.run(2, norms_after_changes, stage, str(tmp_path))
    for rank in range(2):
        assert actual[rank] == pytest.approx(expected[rank], rel=1e-5)
    assert actual[0] == actual[1]


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_reads_while_others_change(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    expected = ranks.run(2, read_while_others_change, None, None)
    assert ranks.run(2, read_while_others_change, stage, str(tmp_path)) == expected


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=SLOW)])
def test_one_rank_alone_asks_for_norms(ranks: Ranks, tmp_path: Path, num_ranks: int) -> None:
    answers = ranks.run(num_ranks, norm_on_one_rank, 3, str(tmp_path))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("stage", STAGES)
def test_who_has_an_address_sees_every_change(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    expected = ranks.run(2, hold_addresses, None, None)
    assert ranks.run(2, hold_addresses, stage, str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("clip", "how gradients were changed in place"),
        ("lr", "the hyperparameters"),
        ("gradients", "which parameters have a gradient"),
        ("optimizer", "which optimizer"),
    ],
)
def test_ranks_that_differ_are_refused(ranks: Ranks, how: str, words: str) -> None:
    for message in ranks.run(2, differing, how):
        assert "optimizer.step: rank 1 differs from rank 0" in message
        assert words in message


@pytest.mark.parametrize("stage", [0, 3, pytest.param(1, marks=SLOW)])
def test_a_step_that_unscales_shows_it_to_all(ranks: Ranks, stage: int) -> None:
    expected = ranks.run(2, unscaled_by_the_step, None, None)
    assert ranks.run(2, unscaled_by_the_step, stage, None) == expected


def test_events_tell_what_ranks_sent(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(2, told_by_events, str(tmp_path / "events"))
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    for rank, stats in enumerate(answers):
        steps = [e for e in told if e["event"] == "step" and e["rank"] == rank]
        assert len(steps) == 2
        assert sum(step["bytes_sent"]["grads"] for step in steps) <= stats["bytes_sent"]["grads"]
        assert all(step["bytes_received"]["grads"] > 0 for step in steps)
        assert "optimizer.step" in steps[-1]["seconds_waited_for_ranks"]
