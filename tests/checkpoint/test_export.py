"""Export: the true current values, in a file that others read, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import zeepo
from tests.faults.small import build, open_at_minimum, train
from zeepo.checkpoint import model_tensors, staged_file
from zeepo.checkpoint.export import divide, export_models
from zeepo.checkpoint.model_tensors import in_pieces
from zeepo.errors import ConfigError, DiskError, SessionError, UnsupportedError


class Odd(nn.Module):
    """Tied weights, views, odd strides, buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv2d(4, 6, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(
            memory_format=torch.channels_last
        )
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.tensor([[True, False]]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("not_kept", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.convolution(torch.ones(1, 4, 4, 4)).mean()
        return self.head(self.embedding(x)) * image + self.transposed.sum() + self.narrow.sum()


def odd() -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Odd()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for step in range(num_steps):
        model(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other.detach())
    )


def assert_file_has(path: Path, model: nn.Module) -> None:
    loaded = load_file(path)
    metadata = metadata_of(path)
    for name, value in model.state_dict().items():
        assert same_bits(loaded[metadata.get(name, name)], value), name


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_put_off_updates_are_in_the_file(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    target = tmp_path / "out.safetensors"
    with open_at_minimum(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(3))
        session.export(target)
        assert session.stats().evictions >= 8
        train(plain, plain_optimizer, range(3))
        assert_file_has(target, plain)
        # the export changed nothing: training goes on with the same bits
        assert train(model, optimizer, range(3, 5)) == train(plain, plain_optimizer, range(3, 5))
        zeepo.export(target)
    assert_file_has(target, plain)


@pytest.mark.parametrize("piece_bytes", [64, 4 << 20])
def test_odd_tensors_are_written_in_logical_order(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_tensors, "PIECE_BYTES", piece_bytes)
    model, optimizer = odd()
    target = tmp_path / "odd.safetensors"
    (tmp_path / "disk").mkdir()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path / "disk") as session:
        run(model, optimizer)
        session.export(target)
    assert_file_has(target, model)
    assert metadata_of(target) == {
        "format": "pt",
        "head.weight": "embedding.weight",
        "same_mask": "mask",
    }
    twin, _ = odd()
    assert load_model(twin, target) == (set(), [])
    for name, value in twin.state_dict().items():
        assert same_bits(value, model.state_dict()[name]), name


def test_a_plain_model_is_the_same_file_as_the_library_s(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    export_models([model], tmp_path / "ours.safetensors", "5GB")
    save_model(model, str(tmp_path / "theirs.safetensors"), {"format": "pt"})
    ours, theirs = (tmp_path / f"{who}.safetensors" for who in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_views_of_a_parameter_are_left_out_as_the_library_does(tmp_path: Path) -> None:
    class WithView(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("view", torch.zeros(0))
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.view = self.weight.detach()[1:3]

    model = WithView()
    target = tmp_path / "view.safetensors"
    export_models([model], target, "5GB")
    assert metadata_of(target) == {"format": "pt", "view": "weight"}
    twin = WithView()
    assert load_model(twin, target) == (set(), [])
    assert torch.equal(twin.view, model.weight[1:3])


def test_parts_of_one_storage_are_all_written(tmp_path: Path) -> None:
    model = nn.Module()
    flat = torch.arange(12.0)
    for number in range(3):
        model.register_buffer(f"part{number}", flat[4 * number : 4 * number + 6])
    export_models([model], tmp_path / "parts.safetensors", "5GB")
    assert len(load_file(tmp_path / "parts.safetensors")) == 3


# -- folders and shards ----------------------------------------------------------------------------


def test_a_folder_is_one_file_or_shards_with_an_index(tmp_path: Path) -> None:
    model, optimizer = build()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    folder = tmp_path / "out"
    disk = tmp_path / "disk"
    disk.mkdir()
    with open_at_minimum(model, optimizer, disk) as session:
        session.export(folder)
        assert names_in(folder) == ["model.safetensors"]
        session.export(folder, max_shard_bytes="10KiB")
        shards = [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
        assert names_in(folder) == sorted([*shards, "model.safetensors.index.json"])
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": total}
        loaded = {}
        for shard in shards:
            assert metadata_of(folder / shard) == {"format": "pt"}
            loaded.update(load_file(folder / shard))
            assert os.stat(folder / shard).st_size < 11 << 10
        assert all(name in load_file(folder / f) for name, f in index["weight_map"].items())
        assert loaded.keys() == index["weight_map"].keys() == model.state_dict().keys()
        assert all(torch.equal(loaded[n], v) for n, v in model.state_dict().items())
        (folder / "config.json").write_text("{}")
        session.export(folder, max_shard_bytes="5KiB")
        session.export(folder, max_shard_bytes=total)
    assert names_in(folder) == ["config.json", "model.safetensors"], "older shards are gone"
    assert_file_has(folder / "model.safetensors", model)


def test_how_names_are_divided() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}
    assert divide(sizes, 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert divide(sizes, 1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert divide(sizes, 100) == [list("abcde")]
    assert divide({}, 5) == [[]]


def test_several_models_get_a_folder_each(tmp_path: Path) -> None:
    one, optimizer = build(1)
    two, _ = build(2)
    optimizers = [optimizer, torch.optim.SGD(two.parameters(), lr=0.1)]
    (tmp_path / "disk").mkdir()
    with zeepo.init([one, two], optimizers, ram="1GiB", disk=tmp_path / "disk") as session:
        session.export(tmp_path / "out")
        with pytest.raises(ConfigError, match=r"2 models.*Give a folder"):
            session.export(tmp_path / "out.safetensors")
    assert names_in(tmp_path / "out") == ["model0", "model1"]
    assert_file_has(tmp_path / "out" / "model0" / "model.safetensors", one)
    assert_file_has(tmp_path / "out" / "model1" / "model.safetensors", two)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_after", [0, 1, 3])
@pytest.mark.parametrize("target", ["model.safetensors", "."])
def test_a_full_disk_leaves_the_older_export(
    tmp_path: Path, target: str, fail_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    out, disk = tmp_path / "out", tmp_path / "disk"
    out.mkdir()
    disk.mkdir()
    with zeepo.init(model, optimizer, ram="1GiB", disk=disk) as session:
        session.export(out / target)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        train(model, optimizer, range(1))
        num_writes = 0

        def full(fd: int, data: Any) -> int:
            nonlocal num_writes
            num_writes += 1
            if num_writes > fail_after:
                raise OSError(errno.ENOSPC, "full")
            return write(fd, data)

        write = os.write
        monkeypatch.setattr(staged_file.os, "write", full)
        with pytest.raises(DiskError, match=r"cannot write .*No space left.*free in.*Free some"):
            session.export(out / target, max_shard_bytes="10KiB")
        monkeypatch.undo()
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        monkeypatch.setattr(staged_file.os, "write", full)
        with pytest.raises(DiskError):  # a folder made for a failed export goes with it
            session.export(out / "new")
        monkeypatch.undo()
        assert names_in(out) == sorted(before)
        session.export(out / target)
        assert_file_has(out / "model.safetensors", model)


def test_written_pages_leave_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(staged_file, "DIRTY_BYTES", 1000)

    def noting(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            calls.append(name)
            return do(*args)

        return noted

    for name in ("write", "fdatasync", "fsync", "posix_fadvise", "replace"):
        monkeypatch.setattr(staged_file.os, name, noting(name, getattr(os, name)))
    with staged_file.staging() as files:
        files.append(staged_file.StagedFile(tmp_path / "x"))
        for _ in range(5):
            files[0].write(b"y" * 500)
        files[0].finish()
        files[0].publish()
    clean = ["write", "write", "fdatasync", "posix_fadvise"]
    assert calls == [*clean, *clean, "write", "fsync", "posix_fadvise", "replace"]
    assert (tmp_path / "x").read_bytes() == b"y" * 2500


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(staged_file.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_models([nn.Linear(3, 3)], tmp_path / "out", "5GB")
    assert names_in(tmp_path) == []


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path: Path) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> str:
            return "text"

    model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="path is empty"):
        export_models([model], "", "5GB")
    with pytest.raises(DiskError, match=r"cannot write .*No such file.*Create the directory"):
        export_models([model], tmp_path / "none" / "x.safetensors", "5GB")
    with pytest.raises(DiskError, match=r"cannot make the folder .*Create the directory"):
        export_models([model], tmp_path / "none" / "x", "5GB")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot make the folder"):
        export_models([model], tmp_path / "file", "5GB")
    (tmp_path / "file").unlink()
    for bad in ("0", 0, "five", -1, 1.5):
        with pytest.raises(ConfigError, match="max_shard_bytes"):
            export_models([model], tmp_path / "x", bad)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"1\._extra_state is a str, not a tensor"):
        export_models([nn.Sequential(model, WithExtra(2, 2))], tmp_path / "x", "5GB")
    for odd_values, what in (
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, 2).to_sparse(), "layout"),
    ):
        model.register_buffer("odd", odd_values)
        with pytest.raises(UnsupportedError, match=f"odd .*{what}"):
            export_models([model], tmp_path / "x", "5GB")
    assert names_in(tmp_path) == []
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ConfigError, match="this is a folder"):
        export_models([nn.Linear(2, 2)], tmp_path / "x.safetensors", "5GB")
    with pytest.raises(SessionError, match="no session is open"):
        zeepo.export(tmp_path / "x")


def test_pieces_are_small_and_in_order() -> None:
    for tensor in (
        torch.arange(1000.0).view(10, 100),
        torch.arange(1000.0).view(10, 100).t(),
        torch.arange(1000.0).view(2, 5, 10, 10).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.zeros(0),
    ):
        pieces = list(in_pieces(tensor, 500))
        assert all(piece.numel() <= 500 for piece in pieces)
        together = [value for piece in pieces for value in piece.reshape(-1).tolist()]
        assert together == tensor.reshape(-1).tolist()
