"""`zeepo.load_safetensors`: the values of safetensors files go into a model, streamed.

The rules are those of `model.load_state_dict`: the same names for what is missing or unexpected,
the same casts. Unlike there, everything is checked first: after an error about names, shapes or
headers the model is unchanged. Beyond a lease only a piece of a tensor is in memory, so a model
built inside `zeepo.lazy()` or in an open session stays in its budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys

from zeepo.checkpoint.model_tensors import PIECE_BYTES, find_covered, in_pieces, state_tensors
from zeepo.checkpoint.safetensors_file import Entry
from zeepo.checkpoint.weight_files import WeightFile, Weights, open_weights
from zeepo.errors import UnsupportedError, WeightsError

_PLAIN_LOADERS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def load_safetensors(
    model: nn.Module, path: str | Path, *, strict: bool = True
) -> _IncompatibleKeys:
    """Copy the values at `path` into the model, one piece at a time.

    `path` is a safetensors file, a folder in Hugging Face's layout (`model.safetensors`, or
    `model.safetensors.index.json` and shards), or such an index. With `strict` every tensor must
    have a value and every value a tensor; otherwise what differs is returned, as `load_state_dict`
    does. A tied tensor needs one of its names.
    """
    tensors = state_tensors(model)
    _refuse_own_loading(model)
    with open_weights(Path(path)) as weights:
        jobs, missing = _match(model, tensors, weights)
        unexpected = [name for name in weights.entries if name not in tensors]
        _check(model, Path(path), jobs, missing, unexpected, strict)
        with torch.no_grad():
            for job in jobs:
                _copy(job)
    return _IncompatibleKeys(missing, unexpected)


@dataclass(frozen=True)
class _Job:
    """One tensor of the model and where its values are."""

    name: str
    tensor: Tensor
    file: WeightFile
    entry: Entry


def _refuse_own_loading(model: nn.Module) -> None:
    """A module that changes a state_dict while loading wants all of it, as tensors."""
    for name, module in model.named_modules():
        hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
        if type(module)._load_from_state_dict not in _PLAIN_LOADERS or any(hooks):
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) has its own way of loading a "
                "state_dict (a hook or _load_from_state_dict), which cannot be streamed. Use "
                "model.load_state_dict(safetensors.torch.load_file(path))."
            )


def _match(
    model: nn.Module, tensors: dict[str, Tensor], weights: Weights
) -> tuple[list[_Job], list[str]]:
    """What to copy, in the model's order, and the names without a value."""
    covered = find_covered(tensors)
    places = {name: place for name in tensors if (place := weights.find(name)) is not None}
    # torch fills in these counters for files older than them
    counters = {
        f"{name}.num_batches_tracked".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _NormBase)
    }
    missing = [
        name
        for name in tensors
        if name not in places
        and name not in counters
        and places.keys().isdisjoint(covered.get(name, []))
    ]
    jobs = [
        _Job(name, tensors[name], *place)
        for name, place in places.items()
        if name in weights.entries or weights.entries.keys().isdisjoint(covered.get(name, []))
    ]
    return jobs, missing


def _check(
    model: nn.Module,
    path: Path,
    jobs: list[_Job],
    missing: list[str],
    unexpected: list[str],
    strict: bool,
) -> None:
    problems = [
        f"size mismatch for {job.name}: copying a param with shape "
        f"{torch.Size(job.entry.shape)} from checkpoint, the shape in current model is "
        f"{job.tensor.shape}."
        for job in jobs
        if job.tensor.shape != job.entry.shape
    ]
    if strict:
        for what, names in (("Unexpected", unexpected), ("Missing", missing)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in names)
                problems.insert(0, f"{what} key(s) in state_dict: {quoted}.")
    if problems:
        lines = "".join(f"\n\t{problem}" for problem in problems)
        raise WeightsError(
            f"Error(s) in loading state_dict for {type(model).__name__} from {path}:{lines}\n"
            "The model is unchanged. Load a file of this model"
            + (", or give strict=False to load what fits by name." if strict else ".")
        )


def _copy(job: _Job) -> None:
    file_itemsize = job.entry.dtype.itemsize
    piece_numel = PIECE_BYTES // max(file_itemsize, job.tensor.element_size())
    buffer = bytearray()
    offset = 0
    for piece in in_pieces(job.tensor, piece_numel):
        nbytes = piece.numel() * file_itemsize
        if len(buffer) < nbytes:
            buffer = bytearray(nbytes)
        job.file.read(job.entry, offset, memoryview(buffer)[:nbytes])
        values: Any = torch.frombuffer(buffer, dtype=job.entry.dtype, count=piece.numel())
        piece.copy_(values.view(piece.shape))
        offset += nbytes
