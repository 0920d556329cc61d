"""Two hosts, made from network namespaces, train together; when their cable is cut, both say so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.faults import Nursery
from tests.dist.hosts import TwoHosts, can_make_hosts
from tests.dist.test_faults import SECONDS, ended_with

pytestmark = pytest.mark.skipif(
    not can_make_hosts(), reason="network namespaces need root and the command ip"
)
PATIENCE_SECONDS = 4.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as two_hosts:
        yield two_hosts


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_hosts_equal_one(
    nursery: Nursery, tmp_path: Path, two_hosts: TwoHosts, stage: int
) -> None:
    options = {"stage": stage, "num_steps": 4}
    alone = nursery.start(2, tmp_path / "one", "train", **options)
    ended_with(alone, 0, 60.0)
    before = two_hosts.bytes_sent(0)
    apart = nursery.start(2, tmp_path / "two", "train", hosts=two_hosts.hosts, **options)
    ended_with(apart, 0, 60.0)
    for one, two in zip(alone, apart, strict=True):
        assert two.result["losses"] == one.result["losses"]
        assert two.result["values"] == one.result["values"]
    counted = sum(apart[0].result["stats"]["bytes_sent"].values())
    assert counted > 100_000
    assert two_hosts.bytes_sent(0) - before > counted  # over the cable, not through memory


@pytest.mark.parametrize("stage", [3])
def test_a_cut_cable_is_named_on_both_sides(
    nursery: Nursery, tmp_path: Path, two_hosts: TwoHosts, stage: int
) -> None:
    disks = tmp_path / "disk"
    disks.mkdir()
    options = {"stage": stage, "num_steps": 10_000, "disk": str(disks)}
    ranks = nursery.start(
        2, tmp_path / "run", "train", hosts=two_hosts.hosts, patience=PATIENCE_SECONDS, **options
    )
    ranks[0].wait_until(3, "forward")
    two_hosts.cut()
    cut_at = time.monotonic()
    for rank, said in enumerate(ended_with(ranks, seconds=PATIENCE_SECONDS + SECONDS)):
        assert f"RankError: rank {rank} waits for rank {1 - rank}" in said
        assert "has not been heard of for" in said
    assert time.monotonic() - cut_at >= PATIENCE_SECONDS - 1.0
    assert list(disks.iterdir()) == []
