"""What of a batch is looked at, and when the ranks' digests are compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zeepo.engine.first_batch import MOST_LOOKS, NOTHING, FirstBatch, digest_of_tensors
from zeepo.launch import launching


def test_values_shapes_and_types_count() -> None:
    x = torch.arange(12.0)
    digests = [
        digest_of_tensors([x]),
        digest_of_tensors([x.view(3, 4)]),
        digest_of_tensors([x.view(torch.int32)]),
        digest_of_tensors([x, x]),
        digest_of_tensors([-x]),
        digest_of_tensors([torch.zeros(0)]),
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of_tensors([{"a": [x]}]) == digest_of_tensors([x.clone()])
    assert digest_of_tensors(["text", 3, None]) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch.randn(4, 6).t(),
        torch.randn(4, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_every_kind_of_tensor(tensor: Tensor) -> None:
    assert digest_of_tensors([tensor]) == digest_of_tensors([tensor.detach().clone()])
    assert digest_of_tensors([tensor]) != digest_of_tensors([torch.zeros_like(tensor)])


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"]
)
def test_what_cannot_be_read_is_not_compared(tensor: Tensor) -> None:
    assert digest_of_tensors([torch.ones(2), tensor]) is None


def test_a_large_batch_is_looked_at_in_part_all_over() -> None:
    large = torch.zeros(64, 3 << 16)
    before = digest_of_tensors([large])
    large[-16:] = 1
    assert digest_of_tensors([large]) != before


def told(capsys: pytest.CaptureFixture[str], batch: FirstBatch, *digests: bytes) -> str:
    batch.compare(digests, rank=0)
    return capsys.readouterr().err


def test_it_is_compared_once(capsys: pytest.CaptureFixture[str]) -> None:
    batch = FirstBatch()
    assert told(capsys, batch, NOTHING, NOTHING) == ""
    assert told(capsys, batch, b"a" * 8, NOTHING) == ""
    assert "all 2 ranks" in told(capsys, batch, b"a" * 8, b"a" * 8)
    assert told(capsys, batch, b"a" * 8, b"a" * 8) == ""
    batch.see([torch.ones(2)])
    assert batch.take() == NOTHING, "it is over"


def test_it_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    batch = FirstBatch()
    batch.see([torch.ones(2)])
    assert batch.take() != NOTHING
    assert batch.take() == NOTHING
    for _ in range(MOST_LOOKS):
        batch.compare([NOTHING, b"a" * 8], rank=0)
    assert told(capsys, batch, b"a" * 8, b"a" * 8) == ""


def test_ranks_that_num_gpus_has_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sliced batches are not compared; tensors that the user indexes are."""
    monkeypatch.setattr(launching, "slices", SimpleNamespace(num_samples=4))
    batch = FirstBatch()
    batch.see([torch.ones(2)])
    assert batch.take() == NOTHING
    monkeypatch.setattr(launching, "slices", SimpleNamespace(num_samples=None))
    batch.see([torch.ones(2)])
    mine = batch.take()
    assert mine != NOTHING
    assert "index your tensors by torch.distributed.get_rank()" in told(capsys, batch, mine, mine)
