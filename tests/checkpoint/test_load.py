"""Loading: the values and the complaints of load_state_dict, into models of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zeepo
from tests.checkpoint.test_export import Odd, odd, run, same_bits
from tests.faults.small import build, open_at_minimum, train
from zeepo.checkpoint import load as load_module
from zeepo.checkpoint.export import export_models
from zeepo.checkpoint.safetensors_file import DTYPES
from zeepo.checkpoint.weight_files import WeightFile
from zeepo.engine.managed import home_of
from zeepo.errors import (
    ConfigError,
    CorruptionError,
    DiskError,
    UnsupportedError,
    WeightsError,
    ZeepoError,
)
from zeepo.units import KiB, MiB

LAZY_RAM = 8 * MiB + 64 * KiB


@contextmanager
def plain(make: Callable[[], nn.Module], disk: Path) -> Iterator[nn.Module]:
    yield make()


@contextmanager
def lazily_built(make: Callable[[], nn.Module], disk: Path) -> Iterator[nn.Module]:
    with zeepo.lazy(ram=LAZY_RAM, disk=disk):
        model = make()
    assert home_of(next(model.parameters())) is not None
    yield model


@contextmanager
def in_a_session(make: Callable[[], nn.Module], disk: Path) -> Iterator[nn.Module]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with open_at_minimum(model, optimizer, disk):
        run(model, optimizer, 2)  # the last update is put off when the load begins
        yield model


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", [plain, lazily_built, in_a_session])
@pytest.mark.parametrize("max_shard_bytes", ["5GB", 500])
@pytest.mark.parametrize("piece_bytes", [64, 4 << 20])
def test_every_kind_of_model_gets_the_values(
    tmp_path: Path,
    disk: Path,
    kind: Any,
    max_shard_bytes: Any,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_module, "PIECE_BYTES", piece_bytes)
    source, optimizer = odd()
    run(source, optimizer)
    folder = tmp_path / "weights"
    export_models([source], folder, max_shard_bytes)
    is_sharded = (folder / "model.safetensors.index.json").exists()
    assert is_sharded == (max_shard_bytes == 500)
    with kind(Odd, disk) as model:
        result = zeepo.load_safetensors(model, folder)
        assert result.missing_keys == result.unexpected_keys == []
        expected = source.state_dict()
        for name, value in model.state_dict().items():
            assert same_bits(value, expected[name]), name
        assert model.head.weight is model.embedding.weight


def test_a_lazy_model_trains_on_from_loaded_values(tmp_path: Path, disk: Path) -> None:
    source, _ = build(3)
    export_models([source], tmp_path / "x.safetensors", "5GB")
    expected, expected_optimizer = build(3)
    with zeepo.lazy(ram=LAZY_RAM, disk=disk):
        model, _ = build(4)
    zeepo.load_safetensors(model, tmp_path / "x.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with open_at_minimum(model, optimizer, disk):
        assert train(model, optimizer, range(3)) == train(expected, expected_optimizer, range(3))


def test_values_are_cast_as_load_state_dict_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES.values():
        if dtype in (torch.float4_e2m1fn_x2, torch.complex64):
            continue
        values = (torch.randn(3, 4) * 4).abs().to(dtype)
        for target_dtype in (dtype, torch.float32, torch.bfloat16, torch.int16):
            model, twin = nn.Module(), nn.Module()
            for each in (model, twin):
                each.register_buffer("b", torch.zeros(3, 4).to(target_dtype))
            save_file({"b": values}, tmp_path / "x.safetensors")
            twin.load_state_dict(load_file(tmp_path / "x.safetensors"))
            zeepo.load_safetensors(model, tmp_path / "x.safetensors")
            assert same_bits(model.b.view(torch.uint8), twin.b.view(torch.uint8)), dtype


# -- names -----------------------------------------------------------------------------------------


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))


def complaint_of_torch(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(tensors)
    return [line.strip().rstrip(". ") for line in str(caught.value).splitlines()[1:]]


def test_complaints_are_load_state_dict_s_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = pair().state_dict()
    del tensors["0.weight"], tensors["1.bias"]
    tensors["2.weight"] = torch.ones(2)
    tensors["odd"] = torch.ones(2)
    tensors["1.weight"] = torch.ones(5, 3)
    save_file(tensors, path)
    model = pair()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        zeepo.load_safetensors(model, path)
    lines = [line.strip().rstrip(". ") for line in str(caught.value).splitlines()]
    assert lines[0] == f"Error(s) in loading state_dict for Sequential from {path}:"
    assert sorted(map(sorted, lines[1:-1])) == sorted(
        map(sorted, complaint_of_torch(pair(), load_file(path)))
    )
    with pytest.raises(WeightsError, match=r"size mismatch for 1\.weight"):
        zeepo.load_safetensors(model, path, strict=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    del tensors["1.weight"]
    save_file(tensors, path)
    result = zeepo.load_safetensors(model, path, strict=False)
    expected = pair().load_state_dict(tensors, strict=False)
    assert sorted(result.missing_keys) == sorted(expected.missing_keys)
    assert sorted(result.unexpected_keys) == sorted(expected.unexpected_keys)
    assert torch.equal(model[0].bias, tensors["0.bias"])
    assert torch.equal(model[1].weight, before["1.weight"])


def test_one_name_of_a_tied_tensor_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    path = tmp_path / "x.safetensors"
    value = torch.randn(3, 3)
    for given in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        save_file({name: value.clone() for name in given}, path)
        model = tied()
        zeepo.load_safetensors(model, path)
        assert torch.equal(model[0].weight, value)
    save_file({"other": value}, path)
    with pytest.raises(WeightsError, match=r'Missing key.*"0\.weight", "1\.weight"'):
        zeepo.load_safetensors(tied(), path)
    # the bytes of a tied tensor are read once
    export_models([tied()], path, "5GB")
    num_reads = 0
    read = WeightFile.read

    def counted(self: WeightFile, *args: Any) -> None:
        nonlocal num_reads
        num_reads += 1
        read(self, *args)

    monkeypatch.setattr(WeightFile, "read", counted)
    zeepo.load_safetensors(tied(), path)
    assert num_reads == 1
    # what was tied when it was written may be loaded into a model where it is not
    untied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    zeepo.load_safetensors(untied, path)
    assert torch.equal(untied[0].weight, untied[1].weight)


def test_counters_younger_than_a_file_are_not_missing(tmp_path: Path) -> None:
    tensors = {
        name: value + 1
        for name, value in nn.BatchNorm1d(3).state_dict().items()
        if name != "num_batches_tracked"
    }
    save_file(tensors, tmp_path / "x.safetensors")
    model = nn.BatchNorm1d(3)
    model.load_state_dict(tensors)
    zeepo.load_safetensors(model, tmp_path / "x.safetensors")
    assert torch.equal(model.running_var, torch.full((3,), 2.0))


def test_models_that_load_in_their_own_way_are_refused(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise AssertionError

    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    told = nn.Linear(2, 2)
    told.register_load_state_dict_post_hook(lambda *_: None)
    for module in (Own(2, 2), hooked, told):
        with pytest.raises(UnsupportedError, match=r"^0 \(.*its own way of loading"):
            zeepo.load_safetensors(nn.Sequential(module), tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match=r"weight is on the meta device"):
        zeepo.load_safetensors(nn.Linear(2, 2, device="meta"), tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match=r"weight has no shape yet"):
        zeepo.load_safetensors(nn.LazyLinear(2), tmp_path / "x.safetensors")


# -- files -----------------------------------------------------------------------------------------


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    model = pair()
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor .*index"):
        zeepo.load_safetensors(model, tmp_path)
    with pytest.raises(DiskError, match=r"there is no weight file .*none"):
        zeepo.load_safetensors(model, tmp_path / "none.safetensors")
    with pytest.raises(DiskError, match=r"there is no weight file .*none"):
        zeepo.load_safetensors(model, tmp_path / "none.index.json")


def test_a_file_cut_short_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    export_models([pair()], path, "5GB")
    whole = path.read_bytes()
    model = pair()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for length in (0, 5, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptionError, match=r"x\.safetensors is not a whole safetensors"):
            zeepo.load_safetensors(model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def sharded(folder: Path) -> tuple[Path, dict[str, Any]]:
    export_models([pair()], folder, 1)
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("inside", ["../x.safetensors", "sub/x.safetensors", "/x", "..", "", 3])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, inside: Any) -> None:
    index, content = sharded(tmp_path / "w")
    save_file({"0.weight": torch.ones(3, 2)}, tmp_path / "x.safetensors")
    content["weight_map"]["0.weight"] = inside
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptionError, match="names files of its own folder only"):
        zeepo.load_safetensors(pair(), tmp_path / "w")


def test_a_wrong_index_is_refused(tmp_path: Path) -> None:
    index, content = sharded(tmp_path / "w")
    zeepo.load_safetensors(pair(), index)
    for text in ("{", "[]", '{"weight_map": []}', "[" * 100_000, "\ud800".encode(errors="replace")):
        index.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(CorruptionError, match="is not an index of safetensors files"):
            zeepo.load_safetensors(pair(), index)
    files = content["weight_map"]
    files["0.weight"] = files["1.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptionError, match=r"'0\.weight' is in .*, where it is not"):
        zeepo.load_safetensors(pair(), index)
    files["0.weight"] = "model-9.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(DiskError, match=r"cannot open .*model-9\.safetensors"):
        zeepo.load_safetensors(pair(), index)


def test_shards_may_be_links_as_in_the_hub_s_cache(tmp_path: Path) -> None:
    index, _ = sharded(tmp_path / "w")
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted((tmp_path / "w").glob("*.safetensors"))):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(tmp_path / "blobs" / str(number))
    assert not zeepo.load_safetensors(pair(), index).missing_keys


def test_errors_are_named_and_builtin() -> None:
    assert issubclass(WeightsError, ZeepoError)
    assert issubclass(WeightsError, RuntimeError), "what load_state_dict raises"
