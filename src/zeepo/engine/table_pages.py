"""Where the pages of a table lie in its parameter and in the chunks of its states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeepo.chunks.chunk import Chunk
from zeepo.engine.managed import Home
from zeepo.engine.states import States
from zeepo.memory.mapping import PAGE_BYTES
from zeepo.memory.records import Numbers


def pages_of_rows(rows: Tensor, num_rows: int, row_bytes: int) -> Numbers:
    """The pages in which rows lie, in order; of rows that do not exist there are none."""
    wanted = torch.unique(rows.detach()).numpy().astype(np.int64)
    wanted = wanted[(wanted >= 0) & (wanted < num_rows)]
    first = wanted * row_bytes // PAGE_BYTES
    last = ((wanted + 1) * row_bytes - 1) // PAGE_BYTES
    most = int((last - first).max(initial=0)) + 1
    pages = first[:, None] + np.arange(most)
    return np.unique(np.minimum(pages, last[:, None]))


@dataclass(frozen=True)
class StateRun:
    """A run of a parameter's elements whose states are in chunks of their own."""

    start: int
    numel: int
    places: Mapping[str, tuple[Chunk, int]]
    """State -> its chunk and slot."""

    @staticmethod
    def all_of(states: States, home: Home, names: Sequence[str]) -> list[StateRun]:
        """In order; together they are the whole parameter."""
        return [
            StateRun(cut.start, cut.numel, {n: states.place(home, n, piece, cut) for n in names})
            for piece in states.pieces(home.chunk)
            for cut in piece.cuts
            if cut.tensor == home.index
        ]

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for chunk, _ in self.places.values()]

    def pages_that_begin(self, itemsize: int, most: int) -> Iterator[Numbers]:
        """Those whose first element is in the run."""
        width = PAGE_BYTES // itemsize
        return _groups(-(-self.start // width), -(-(self.start + self.numel) // width), most)

    def pages_that_touch(self, itemsize: int, most: int) -> Iterator[Numbers]:
        """Those with any element of the run."""
        width = PAGE_BYTES // itemsize
        return _groups(self.start // width, -(-(self.start + self.numel) // width), most)

    def copy_state(self, name: str, matrix: Tensor, pages: Numbers, *, to_matrix: bool) -> None:
        """Between neighbouring pages, the rows of `matrix`, and a state's leased chunk; of both
        what the other has."""
        chunk, slot = self.places[name]
        storage = chunk.storages[slot]
        if storage is None:  # the user has put another state in its place
            return
        flat = torch.empty(0, dtype=matrix.dtype).set_(storage, 0, (self.numel,), (1,))
        width = matrix.shape[1]
        low = max(self.start, int(pages[0]) * width)
        high = min(self.start + self.numel, (int(pages[-1]) + 1) * width)
        if low < high:
            some = flat[low - self.start : high - self.start]
            _copy_run(matrix, low - int(pages[0]) * width, some, to_matrix=to_matrix)


def copy_values(home: Home, matrix: Tensor, pages: Numbers, *, to_matrix: bool) -> None:
    """Between neighbouring pages, the rows of `matrix`, and a leased parameter."""
    flat = home.plain.view(-1)
    width = matrix.shape[1]
    some = flat[int(pages[0]) * width : (int(pages[-1]) + 1) * width]
    _copy_run(matrix, 0, some, to_matrix=to_matrix)


def _groups(start: int, stop: int, most: int) -> Iterator[Numbers]:
    for low in range(start, stop, most):
        yield np.arange(low, min(low + most, stop), dtype=np.int64)


def _copy_run(matrix: Tensor, at: int, flat: Tensor, *, to_matrix: bool) -> None:
    """Between `flat` and the elements of a matrix from number `at` on, row by row."""
    width, done = matrix.shape[1], 0
    while done < flat.numel():
        row, column = divmod(at + done, width)
        left = flat.numel() - done
        if column == 0 and left >= width:
            count = left // width
            block, run = matrix[row : row + count], flat[done : done + count * width]
            run = run.view(count, width)
        else:
            count = min(width - column, left)
            block, run = matrix[row, column : column + count], flat[done : done + count]
        target, source = (block, run) if to_matrix else (run, block)
        target.copy_(source)
        done += run.numel()
