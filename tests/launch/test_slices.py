"""Slices of batches: every sample on one rank, the same batches on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zeepo
from zeepo.launch.slices import Slices, slice_of


@given(st.integers(0, 1000), st.integers(1, 17))
def test_slices_cover_a_batch(length: int, num_ranks: int) -> None:
    parts = [slice_of(length, rank, num_ranks) for rank in range(num_ranks)]
    assert [i for part in parts for i in range(length)[part]] == list(range(length))
    sizes = [part.stop - part.start for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


class Seen(Dataset[Any]):
    """Remembers what was read."""

    def __init__(self, length: int):
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return torch.tensor([float(index)]), index


class Stream(IterableDataset[Any]):
    """Samples that can only be read in a row."""

    def __iter__(self) -> Iterator[Any]:
        return ({"x": torch.tensor([float(i)]), "name": f"n{i}"} for i in range(10))


class Team:
    """Several ranks, one after the other in this process; rank 0 has to come first."""

    def __init__(self, num_ranks: int):
        store = dist.HashStore()
        self.slices = [Slices(rank, num_ranks, store) for rank in range(num_ranks)]

    def each(self, take: Any) -> list[Any]:
        found = []
        for slices in self.slices:
            torch.rand(slices._rank)  # the ranks' random numbers have gone apart
            slices.install()
            try:
                found.append(take())
            finally:
                slices.remove()
        return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_rank_reads_its_own_samples_of_the_same_batches(num_workers: int) -> None:
    data = Seen(23)
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    team = Team(3)
    loaders = [DataLoader(data, batch_size=8, shuffle=True, **options) for _ in team.slices]

    def take() -> tuple[list[list[int]], list[int | None]]:
        data.read.clear()
        slices = next(s for s in team.slices if s._undo is not None)
        loader = loaders[slices._rank]
        taken = [(y.tolist(), slices.num_samples) for _, y in loader]
        assert len(loader) == 3
        if not num_workers:
            assert sorted(data.read) == sorted(i for y, _ in taken for i in y)
        return [y for y, _ in taken], [count for _, count in taken]

    for _ in range(2):
        found = team.each(take)
        assert [counts for _, counts in found] == [[3, 3, 3], [3, 3, 2], [2, 2, 2]]
        together = [[i for batches, _ in found for i in batches[n]] for n in range(3)]
        assert [len(batch) for batch in together] == [8, 8, 7]
        assert sorted(i for batch in together for i in batch) == list(range(23))
        assert len({slices.digest for slices in team.slices}) == 1
    assert sorted(y for _, ys in loaders[0] for y in ys.tolist()) == list(range(23)), "whole again"


def test_who_has_no_sample_has_one_that_counts_nothing() -> None:
    loader = DataLoader(Seen(2), batch_size=8)
    team = Team(3)
    found = team.each(lambda: [y.tolist() for _, y in loader])
    assert found == [[[0]], [[1]], [[0]]]
    assert [slices.num_samples for slices in team.slices] == [1, 1, 0]


def test_a_stream_is_read_whole_and_cut() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    found = Team(3).each(lambda: [(b["x"].flatten().tolist(), b["name"]) for b in loader])
    assert found[0] == [([0, 1], ["n0", "n1"]), ([4, 5], ["n4", "n5"]), ([8], ["n8"])]
    assert found[1] == [([2], ["n2"]), ([6], ["n6"]), ([9], ["n9"])]
    assert found[2] == [([3], ["n3"]), ([7], ["n7"]), ([8], ["n8"])]


def test_evaluation_sees_everything() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    with torch.no_grad():
        assert Team(2).each(lambda: sum(len(x) for (x,) in loader)) == [10, 10]


def test_a_distributed_sampler_is_left_alone() -> None:
    data = TensorDataset(torch.arange(10))
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    assert Team(2).each(lambda: [x.tolist() for (x,) in loader]) == [[[1, 3, 5, 7], [9]]] * 2


def test_what_makes_its_own_batches_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=None)
    with pytest.raises(zeepo.UnsupportedError, match="batch_size=None"):
        Team(2).each(lambda: list(loader))
