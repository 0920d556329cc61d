"""Ranks go different ways and read alone; nothing hangs and the numbers are the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.ranks import Ranks
from tests.dist.routing import reference, routed


@pytest.mark.parametrize(
    ("num_ranks", "stage", "steps"),
    [
        (3, 3, 10),
        pytest.param(2, 3, 12, marks=pytest.mark.slow),
        pytest.param(3, 1, 8, marks=pytest.mark.slow),
        pytest.param(3, 3, 200, marks=pytest.mark.slow),
        pytest.param(4, 2, 20, marks=pytest.mark.slow),
    ],
)
def test_random_routes(
    ranks: Ranks, tmp_path: Path, num_ranks: int, stage: int, steps: int
) -> None:
    expected = reference(num_ranks, steps)
    answers = ranks.run(num_ranks, routed, steps, str(tmp_path), stage)
    for rank, answer in enumerate(answers):
        assert answer["losses"] == [losses[rank] for losses in expected["losses"]]
        assert answer["values"] == expected["values"]
        assert answer["stats"]["evictions"] > 0
