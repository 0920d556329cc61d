"""Writing a model's current values as safetensors, streamed.

A tensor is read in pieces of a few MiB while its chunk is leased, so beyond what a lease brings in
only a piece is in memory, and updates that were put off are carried out by the reading itself.
Invariant: an older export stays as it is until the new one is whole on the disk, and on any failure
nothing of the new one is left.

A path that ends in ".safetensors" is one file. Any other is a folder in Hugging Face's layout: one
file, or shards and an index. Several models get a folder each (`model0`, `model1`, ...), because
each is loaded on its own. Of tied names the model's first is written and the others are in the
metadata (`left out -> written`), as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from zeepo.checkpoint.model_tensors import bytes_in_order, find_left_out, state_tensors
from zeepo.checkpoint.safetensors_file import arrange, encode_header, nbytes_of
from zeepo.checkpoint.staged_file import StagedFile, make_names_durable, remove, staging
from zeepo.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME
from zeepo.errors import ConfigError
from zeepo.memory.files import disk_error
from zeepo.units import parse_bytes

SUFFIX = ".safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def export_models(
    models: Sequence[nn.Module], path: str | Path, max_shard_bytes: int | str
) -> None:
    """Write what the models' `state_dict()` holds now."""
    if not str(path):  # to Path it is the current folder, where other weights may be
        raise ConfigError("export: the path is empty. Give a folder or a .safetensors file.")
    target = Path(path)
    limit = _shard_limit(max_shard_bytes)
    if target.suffix == SUFFIX:
        if len(models) > 1:
            raise ConfigError(
                f"export({str(path)!r}): the session has {len(models)} models, one file holds one. "
                "Give a folder: each model gets a folder of its own in it (model0, model1, ...)."
            )
        if target.is_dir():
            raise ConfigError(
                f"export({str(path)!r}): this is a folder, and the name asks for one file. Remove "
                "it, or give another name."
            )
        _export_file(models[0], target)
        return
    with _folder(target):
        if len(models) == 1:
            _export_folder(models[0], target, limit)
            return
        for number, model in enumerate(models):
            with _folder(target / f"model{number}") as folder:
                _export_folder(model, folder, limit)


def _shard_limit(max_shard_bytes: int | str) -> int:
    try:
        limit = parse_bytes(max_shard_bytes)
    except ValueError as error:
        raise ConfigError(f"export: max_shard_bytes: {error}") from None
    if limit == 0:
        raise ConfigError('export: max_shard_bytes is 0. Give a size such as "5GB".')
    return limit


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder, made if need be; one that was made for a failed export is removed again."""
    is_new = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise disk_error(f"make the folder {path}", path, error) from error
    try:
        yield path
    except BaseException:
        if is_new and not any(path.iterdir()):
            path.rmdir()
        raise


# -- one model -------------------------------------------------------------------------------------


def _export_file(model: nn.Module, target: Path) -> None:
    tensors = state_tensors(model)
    left_out = find_left_out(tensors)
    written = [name for name in tensors if name not in left_out]
    with staging() as files:
        _write(files, target, written, tensors, left_out)
        files[0].publish()
        make_names_durable(target.parent)


def _export_folder(model: nn.Module, folder: Path, max_shard_bytes: int) -> None:
    tensors = state_tensors(model)
    left_out = find_left_out(tensors)
    sizes = {
        name: nbytes_of(tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
        if name not in left_out
    }
    shards = divide(sizes, max_shard_bytes)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        total = len(shards)
        names = [f"model-{number:05d}-of-{total:05d}{SUFFIX}" for number in range(1, total + 1)]
    with staging() as files:
        for file_name, shard in zip(names, shards, strict=True):
            _write(files, folder / file_name, shard, tensors, left_out)
        if len(shards) > 1:
            weight_map = {
                name: file for file, shard in zip(names, shards, strict=True) for name in shard
            }
            _write_index(files, folder / INDEX_NAME, weight_map, sum(sizes.values()))
        _replace_older(folder, files)


def divide(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names by shard, in their order; a tensor larger than a shard has one to itself."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, nbytes in sizes.items():
        if shards[-1] and shard_bytes + nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += nbytes
    return shards


@torch.no_grad()
def _write(
    files: list[StagedFile],
    target: Path,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    left_out: Mapping[str, str],
) -> None:
    """Stage one file with the tensors of these names."""
    entries = arrange((name, tensors[name].dtype, tensors[name].shape) for name in names)
    elsewhere = {name: kept for name, kept in left_out.items() if kept in set(names)}
    file = StagedFile(target)
    files.append(file)
    file.write(encode_header(entries, {**elsewhere, "format": "pt"}))
    for entry in entries:
        for data in bytes_in_order(tensors[entry.name]):
            file.write(data)
    file.finish()


def _write_index(
    files: list[StagedFile], target: Path, weight_map: Mapping[str, str], total_bytes: int
) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    file = StagedFile(target)
    files.append(file)
    file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    file.finish()


def _replace_older(folder: Path, files: Sequence[StagedFile]) -> None:
    """Publish; the last of `files` is what a reader looks for. An older export is removed.

    Readers prefer the single file to the index. In this order they find the old weights, or none,
    or the new ones at any moment, and never shards of both.
    """
    if len(files) > 1:
        remove(folder / INDEX_NAME)
    for file in files:
        file.publish()
    make_names_durable(folder)
    new = {file.target.name for file in files}
    for old in sorted(folder.iterdir()):
        is_weights = old.name in (SINGLE_NAME, INDEX_NAME) or _SHARD.fullmatch(old.name)
        if is_weights and old.name not in new:
            remove(old)
