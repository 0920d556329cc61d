"""Finding and reading safetensors files: one, or shards listed by an index.

Invariant: nothing outside the folder of the index is opened, whatever the index says; a header is
checked against the size of its file before anything is read; what was read does not stay in the
page cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zeepo.checkpoint.safetensors_file import (
    LENGTH_BYTES,
    Entry,
    decode_header,
    header_length,
    malformed,
)
from zeepo.errors import ConfigError, CorruptionError, DiskError
from zeepo.memory.files import disk_error

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CACHED_BYTES = 16 << 20
"""How much of a file may stay in the page cache after it was read."""


class WeightFile:
    """A safetensors file, open for reading."""

    def __init__(self, path: Path):
        self.path = path
        self._num_cached_bytes = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise disk_error(f"open {path}", path, error) from error
        try:
            size = os.fstat(self._fd).st_size
            first = bytearray(min(LENGTH_BYTES, size))
            self._fill(memoryview(first), 0)
            text = bytearray(header_length(bytes(first), size, str(path)))
            self._fill(memoryview(text), LENGTH_BYTES)
            self.header = decode_header(bytes(text), size, str(path))
        except BaseException:
            self.close()
            raise

    def read(self, entry: Entry, offset: int, target: memoryview) -> None:
        """Fill `target` with an entry's bytes from `offset` on."""
        self._fill(target, self.header.data_start + entry.start + offset)
        self._num_cached_bytes += len(target)
        if self._num_cached_bytes >= CACHED_BYTES:
            self._drop_cache()

    def _fill(self, target: memoryview, position: int) -> None:
        while target:
            try:
                count = os.preadv(self._fd, [target], position)
            except OSError as error:
                raise disk_error(f"read {self.path}", self.path, error) from error
            if count == 0:
                raise malformed(str(self.path), f"it ends at {position} bytes")
            position += count
            target = target[count:]

    def _drop_cache(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._num_cached_bytes = 0

    def close(self) -> None:
        self._drop_cache()
        os.close(self._fd)


class Weights:
    """All tensors of one model, in one file or several."""

    def __init__(
        self, entries: Mapping[str, tuple[WeightFile, Entry]], left_out: Mapping[str, str]
    ):
        self.entries = entries
        self._left_out = left_out

    def find(self, name: str) -> tuple[WeightFile, Entry] | None:
        """Where a tensor is, also under the name it was tied to when it was written."""
        return self.entries.get(name) or self.entries.get(self._left_out.get(name, ""))


@contextmanager
def open_weights(path: Path) -> Iterator[Weights]:
    """The tensors at `path`: a file, a folder in Hugging Face's layout, or an index."""
    found = _locate(path)
    with ExitStack() as stack:

        def opened(file_path: Path) -> WeightFile:
            file = WeightFile(file_path)
            stack.callback(file.close)
            return file

        if found.suffix == ".json":
            weight_map = _read_index(found)
            files = {name: opened(found.parent / name) for name in sorted(set(weight_map.values()))}
            entries = {
                name: (files[file], _listed_entry(files[file], name, found))
                for name, file in weight_map.items()
            }
        else:
            file = opened(found)
            files = {found.name: file}
            entries = {name: (file, entry) for name, entry in file.header.entries.items()}
        left_out: dict[str, str] = {}
        for file in files.values():
            left_out.update(file.header.metadata)
        yield Weights(entries, left_out)


def _locate(path: Path) -> Path:
    if not path.exists():
        raise DiskError(
            f"there is no weight file {path}. Give the path of a safetensors file, of its index, "
            "or of a folder written by session.export or save_pretrained."
        )
    if not path.is_dir():
        return path
    for name in (SINGLE_NAME, INDEX_NAME):
        if (path / name).exists():
            return path / name
    raise ConfigError(
        f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}. Give the path of the file itself, or "
        "a folder written by session.export or save_pretrained."
    )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, each a file beside the index."""
    try:
        index: Any = json.loads(path.read_text())
    except OSError as error:
        raise disk_error(f"read {path}", path, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{path} is not an index of safetensors files ({error}). Write or download it again."
        ) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptionError(
            f'{path} is not an index of safetensors files: it has no "weight_map". Write or '
            "download it again."
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & {"/", "\\", "\0"}:
            raise CorruptionError(
                f"{path} says that {name!r} is in {file!r}: an index names files of its own folder "
                "only. The index is damaged or not to be trusted; write or download it again."
            )
    return weight_map


def _listed_entry(file: WeightFile, name: str, index: Path) -> Entry:
    entry = file.header.entries.get(name)
    if entry is None:
        raise CorruptionError(
            f"{index} says that {name!r} is in {file.path.name}, where it is not: the files are of "
            "different exports. Write or download them again."
        )
    return entry
