"""Ranks that all train on the same batch are told so, once; others never are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.batch_programs import said
from tests.dist.ranks import Ranks

SAME = "ranks were given the same batch in the first step"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, {"is_late": True}, {"num_local": 1}, {"weigh_samples": False}], ids=str
)
def test_the_same_batch_is_told_once(
    ranks: Ranks, num_ranks: int, options: dict[str, Any]
) -> None:
    first, *others = ranks.run(num_ranks, said, "same", **options)
    assert len(first) == 1
    assert f"all {num_ranks} {SAME}" in first[0]
    assert "DistributedSampler" in first[0]
    assert f"zeepo.init(num_gpus={num_ranks})" in first[0]
    assert others == [[]] * (num_ranks - 1)


@pytest.mark.parametrize(
    "kind",
    ["own", "same later", "other in its last element", "no tensors", "tensors on one rank"],
)
def test_nothing_is_told_of_others(ranks: Ranks, kind: str) -> None:
    lines = [line for of_rank in ranks.run(2, said, kind) for line in of_rank]
    assert not [line for line in lines if SAME in line]
