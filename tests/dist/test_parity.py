"""Ranks under zeepo give the bits of DDP, whatever the stage and the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import Ranks
from tests.dist.training import (
    on_one_batch,
    on_uneven_batches,
    step_without_sync,
    under_ddp,
    under_zeepo,
    with_different_changes,
    with_own_changes,
    with_own_changes_plainly,
    with_set_gradients,
    with_unequal_ram,
)

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (0, "disk"),
        (1, "ram"),
        (2, "disk"),
        (3, "disk"),
        *(pytest.param(stage, where, marks=SLOW) for stage, where in ((0, "ram"), (1, "disk"))),
        *(pytest.param(stage, where, marks=SLOW) for stage, where in ((2, "ram"), (3, "ram"))),
    ],
)
def test_two_ranks_equal_ddp(ranks: Ranks, tmp_path: Path, stage: int, where: str) -> None:
    plain = ranks.run(2, under_ddp)
    disk = str(tmp_path) if where == "disk" else None
    ours: list[Any] = ranks.run(2, under_zeepo, stage, disk, {})
    for rank in range(2):
        assert ours[rank]["seen"] == plain[rank]["seen"]
        assert ours[rank]["values"].keys() == plain[rank]["values"].keys()
        differing = [
            k for k, v in plain[rank]["values"].items() if ours[rank]["values"][k] != v
        ]
        assert differing == []


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=SLOW), pytest.param(2, marks=SLOW), 3]
)
def test_accumulation_without_sync_equals_ddp(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    plain = ranks.run(2, under_ddp, micro=3)
    ours: list[Any] = ranks.run(2, under_zeepo, stage, str(tmp_path), {}, micro=3)
    for rank in range(2):
        assert ours[rank]["seen"] == plain[rank]["seen"]
        assert ours[rank]["values"] == plain[rank]["values"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
def test_ranks_with_more_memory_take_more(ranks: Ranks, stage: int) -> None:
    plain = ranks.run(2, under_ddp)
    ours = ranks.run(2, with_unequal_ram, stage)
    assert [ours[rank]["seen"] for rank in range(2)] == [plain[rank]["seen"] for rank in range(2)]
    assert ours[0]["values"] == plain[0]["values"]
    assert 2.5 < ours[0]["held"] / ours[1]["held"] < 3.5
    assert "75% of what is split" in ours[0]["text"]


def test_clipping_is_the_same_in_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(2, under_ddp, clip=0.05)
    of_stage = [ranks.run(2, under_zeepo, s, None, {}, clip=0.05) for s in (0, 1, 3)]
    of_stage += [ranks.run(2, under_zeepo, s, str(tmp_path), {}, clip=0.05) for s in (2, 3)]
    for ours in of_stage[1:]:
        assert ours[0]["seen"] == of_stage[0][0]["seen"]
        assert ours[0]["values"] == of_stage[0][0]["values"]
    norms = zip(plain[0]["seen"][1::2], of_stage[0][0]["seen"][1::2], strict=True)
    first_ddp, first_ours = next(iter(norms))
    assert abs(first_ddp - first_ours) <= 2 * 2**-23 * first_ddp


@pytest.mark.parametrize(
    ("stage", "where"), [(0, "ram"), pytest.param(1, "disk", marks=SLOW), (3, "disk")]
)
def test_changes_by_hand_equal_ddp(ranks: Ranks, tmp_path: Path, stage: int, where: str) -> None:
    plain = ranks.run(2, with_own_changes_plainly)
    ours = ranks.run(2, with_own_changes, stage, str(tmp_path) if where == "disk" else None)
    for rank in range(2):
        expected = plain[rank]["values"]
        assert [k for k in expected if ours[rank]["values"][k] != expected[k]] == []


def test_different_changes_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, with_different_changes):
        assert "layers.2 was changed to other values on rank 1 than on rank 0" in message


@pytest.mark.parametrize(
    ("stage", "where"), [(0, "ram"), (3, "disk"), pytest.param(1, "ram", marks=SLOW)]
)
def test_gradients_set_by_hand_equal_ddp(
    ranks: Ranks, tmp_path: Path, stage: int, where: str
) -> None:
    plain = ranks.run(2, with_set_gradients, None, None)
    ours = ranks.run(2, with_set_gradients, stage, str(tmp_path) if where == "disk" else None)
    for rank in range(2):
        expected = plain[rank]["values"]
        assert [k for k in expected if ours[rank]["values"][k] != expected[k]] == []


@pytest.mark.parametrize(
    ("counts", "stage", "where"),
    [
        ([5, 3], 3, "disk"),
        pytest.param([2, 7], 1, "ram", marks=SLOW),
        pytest.param([4, 1, 3], 2, "ram", marks=SLOW),
        pytest.param([4, 1, 3], 3, "disk", marks=SLOW),
    ],
)
def test_uneven_batches_are_weighted(
    ranks: Ranks, tmp_path: Path, counts: list[int], stage: int, where: str
) -> None:
    disk = str(tmp_path) if where == "disk" else None
    expected = on_one_batch(counts)
    for answer in ranks.run(len(counts), on_uneven_batches, stage, disk, counts):
        assert [k for k in expected if answer["values"][k] != expected[k]] == []


def test_a_step_needs_reduced_gradients(ranks: Ranks) -> None:
    for message in ranks.run(2, step_without_sync):
        assert "was made inside no_sync() and is this rank's own" in message
