"""A large embedding, page by page on disk, with its states beside it.

A step looks up few rows of an embedding, and only these get a gradient; but an optimizer such as
AdamW changes every row in every step. So a page (4 KiB of the parameter) lies on disk in one record
with the pages of its states, and the updates of a page whose gradient is zero wait until somebody
looks it up, or until their turn has come: in every step a part of all pages catches up, so that
none is behind by more than `CATCH_UP_STEPS` updates. The numbers are the same: an update by
elements with a gradient of zero depends on nothing else.

While it is a table, the parameter's and the states' chunks hold nothing, and whoever uses one of
them in another way than to look up rows has all of it back first (`leave`, by the chunks'
`before_use`). A lookup finds its rows at their places in memory of which only these pages are there
(`SparsePages`), so torch's own kernels run; its gradient is made in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from zeepo.chunks.chunk import Chunk
from zeepo.chunks.retired import fill, retire
from zeepo.chunks.storages import is_exclusive, new_storage, swap_memory
from zeepo.chunks.store import ChunkStore
from zeepo.engine.managed import Home, plain_torch
from zeepo.engine.states import States
from zeepo.engine.table_pages import StateRun, copy_values, pages_of_rows
from zeepo.errors import InternalError
from zeepo.memory.mapping import PAGE_BYTES, SparsePages
from zeepo.memory.pool import Buffer
from zeepo.memory.records import Numbers, Records
from zeepo.optim.catch_up import PastUpdate, catch_up

CATCH_UP_STEPS = 32
"""No page is behind by more updates: so many of them are remembered."""
GROUP_PAGES = 512
"""So many pages are moved at once when a table is made or given up."""
TABLE_TAG = "embedding rows"


class Held:
    """Some pages in RAM, with all their updates."""

    def __init__(self, numbers: Numbers, buffer: Buffer, num_tensors: int, dtype: torch.dtype):
        self.numbers = numbers
        self.buffer = buffer
        self.nbytes = len(numbers) * num_tensors * PAGE_BYTES
        flat = torch.empty(0, dtype=dtype)
        if self.nbytes:
            flat = torch.frombuffer(self.memory, dtype=dtype)
        self.records = flat.view(len(numbers), num_tensors, PAGE_BYTES // dtype.itemsize)
        """(page, parameter or state, element)"""
        self.is_changed = False

    @property
    def memory(self) -> memoryview:
        return self.buffer.memory[: self.nbytes]


class Table:
    """One embedding that is looked up by rows."""

    def __init__(self, store: ChunkStore, home: Home, names: Sequence[str], records: Records):
        self.home = home
        self._store = store
        self._names = tuple(names)
        """Of the states, in the order in which records have them, behind the parameter."""
        self._records = records
        self._dtype = home.plain.dtype
        self._num_done = np.zeros(records.num_records, dtype=np.int64)
        """Page -> how many updates it has had since the table was made: all that are in `past` but
        the last `num_updates - num_done` of them."""
        self._num_updates = 0
        self._past: deque[PastUpdate] = deque()
        self._held: Held | None = None
        self._writing: deque[tuple[Future[None], Held]] = deque()
        self._sweep: tuple[Future[None], Held, Numbers] | None = None
        """Pages whose turn it is, on their way here, and how many updates they have had."""
        self._next_page = 0
        nbytes = home.plain.numel() * home.plain.element_size()
        self._nbytes = nbytes
        self._row_bytes = nbytes // home.plain.shape[0]
        self._shown = SparsePages(nbytes)
        self._gradient = SparsePages(nbytes)
        self._gradient_rows: Tensor | None = None

    @property
    def chunk(self) -> Chunk:
        return self.home.chunk

    # -- looking up -------------------------------------------------------------------------------

    def show(self, rows: Tensor) -> None:
        """Rows are at their places, the rest is zeros, until `hide`."""
        held = self._hold(self._pages_of(rows))
        with plain_torch(), torch.no_grad():
            self._view_of(self._shown)[torch.from_numpy(held.numbers)] = held.records[:, 0]
            swap_memory(self._storage(), self._storage_over(self._shown))

    def hide(self) -> None:
        swap_memory(self._storage(), new_storage(0))
        self._shown.forget()

    def _storage(self) -> UntypedStorage:
        storage = self.chunk.storages[self.home.index]
        if storage is None:
            raise InternalError(f"{self.chunk.label} lost its place")
        return storage

    def _storage_over(self, pages: SparsePages) -> UntypedStorage:
        return torch.frombuffer(pages.memory[: self._nbytes], dtype=torch.uint8).untyped_storage()

    def _view_of(self, pages: SparsePages) -> Tensor:
        return torch.frombuffer(pages.memory, dtype=self._dtype).view(self._records.num_records, -1)

    def _pages_of(self, rows: Tensor) -> Numbers:
        return pages_of_rows(rows, self.home.plain.shape[0], self._row_bytes)

    def _hold(self, pages: Numbers) -> Held:
        """These pages, maybe among others, in RAM and up to date."""
        held = self._held
        if held is not None and np.isin(pages, held.numbers, assume_unique=True).all():
            return held
        self.flush()
        held = self._new_held(pages)
        try:
            self._store.wait(self._records.read(pages, held.memory, is_urgent=True))
        except BaseException:
            held.buffer.release()
            raise
        held.is_changed = self._bring_up(held, self._num_done[pages])
        self._num_done[pages] = self._num_updates
        self._held = held
        return held

    def _new_held(self, pages: Numbers) -> Held:
        nbytes = max(1, len(pages) * self._records.record_bytes)
        buffer = self._store.new_buffer(nbytes, TABLE_TAG)
        buffer.touched()
        return Held(pages, buffer, 1 + len(self._names), self._dtype)

    def _bring_up(self, held: Held, num_done: Numbers) -> bool:
        """Do the updates that pages have missed; whether there were any."""
        num_missed = self._num_updates - num_done
        if not num_missed.any():
            return False
        order = np.argsort(-num_missed, kind="stable")
        order = order[: int(np.count_nonzero(num_missed))]
        rows = torch.from_numpy(order)
        with plain_torch(), torch.no_grad():
            values, states = self._taken(held, rows)
            catch_up(values, states, num_missed[order], tuple(self._past))
            self._put(held, rows, values, states)
        return True

    def _taken(self, held: Held, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of some pages and of their states, each of them contiguous."""
        values, *states = (held.records[:, i][rows] for i in range(held.records.shape[1]))
        return values, dict(zip(self._names, states, strict=True))

    def _put(self, held: Held, rows: Tensor, values: Tensor, states: dict[str, Tensor]) -> None:
        held.records[:, 0][rows] = values
        for number, name in enumerate(self._names, 1):
            held.records[:, number][rows] = states[name]

    # -- gradients --------------------------------------------------------------------------------

    def take(self, nbytes: int) -> UntypedStorage | None:
        """A gradient that is made in another way than by adding rows takes torch's own memory."""
        self._store.expect(nbytes)
        return None

    def take_zeros(self, rows: Tensor) -> UntypedStorage | None:
        """Memory for the gradient of the parameter, to which rows are added."""
        if self._gradient_rows is not None:  # of a backward that went wrong, or of another lookup
            self._gradient = SparsePages(self._nbytes)
        self._gradient_rows = rows
        return self._storage_over(self._gradient)

    def expect(self, nbytes: int) -> None:
        self._store.expect(nbytes)

    def is_managed(self, tensor: Tensor) -> bool:
        return False

    def has_made(self, gradient: Tensor) -> bool:
        """Whether a gradient is the one that rows were added to, and nothing else is in it: a hook
        may have changed it anywhere, by whatever way."""
        if self._gradient_rows is None or not is_exclusive(gradient):
            return False
        start = torch.frombuffer(self._gradient.memory, dtype=torch.uint8).data_ptr()
        if gradient.data_ptr() != start or not gradient.is_contiguous():
            return False
        touched = self._gradient.touched_pages()
        if touched is None:
            return False
        touched[self._pages_of(self._gradient_rows)] = False
        return not touched.any()

    # -- updating ---------------------------------------------------------------------------------

    def update(self, update: PastUpdate) -> None:
        """One more update, with the gradient that was made; all other rows have zeros."""
        assert self._gradient_rows is not None
        self._finish_sweep()
        pages = self._pages_of(self._gradient_rows)
        held = self._hold(pages)
        places = torch.from_numpy(np.searchsorted(held.numbers, pages))
        with plain_torch(), torch.no_grad():
            values, states = self._taken(held, places)
            grads = self._view_of(self._gradient)[torch.from_numpy(pages)]
            self._gradient_rows = None
            self._gradient.forget()
            update.run_on(values, grads, states)
            self._put(held, places, values, states)
        self._num_updates += 1
        self._num_done[pages] = self._num_updates
        held.is_changed = True
        self.flush()
        self._past.append(update)
        self._begin_sweep()
        while len(self._past) > self._num_updates - self._num_done.min():
            self._past.popleft()

    def flush(self) -> None:
        """What is held goes to disk if it was changed."""
        held, self._held = self._held, None
        if held is not None:
            self._let_go(held)

    def let_go(self) -> bool:
        """Nothing is in RAM afterwards; whether anything was."""
        has_any = bool(self._held or self._sweep or self._writing)
        self._finish_sweep()
        self.flush()
        self._settle()
        return has_any

    def _let_go(self, held: Held) -> None:
        if not held.is_changed:
            held.buffer.release()
            return
        self._settle(keep=1)
        self._writing.append((self._records.write(held.numbers, held.memory), held))

    def _settle(self, keep: int = 0) -> None:
        """Wait for writes, but for the last ones."""
        while len(self._writing) > keep:
            future, held = self._writing.popleft()
            try:
                self._store.wait(future)
            finally:
                held.buffer.release()

    def _begin_sweep(self) -> None:
        """The pages whose turn it is come here while the next step goes on."""
        num_pages = self._records.num_records
        count = min(num_pages, -(-num_pages // (CATCH_UP_STEPS - 1)))
        start = self._next_page if self._next_page < num_pages else 0
        pages = np.arange(start, min(start + count, num_pages), dtype=np.int64)
        self._next_page = start + count
        held = self._new_held(pages)
        self._sweep = self._records.read(pages, held.memory), held, self._num_done[pages]

    def _finish_sweep(self) -> None:
        """They catch up, but for those that somebody has looked up meanwhile."""
        if self._sweep is None:
            return
        (future, held, num_done), self._sweep = self._sweep, None
        try:
            self._store.wait(future)
        except BaseException:
            held.buffer.release()
            raise
        is_same = self._num_done[held.numbers] == num_done
        self._bring_up(held, np.where(is_same, num_done, self._num_updates))
        self._num_done[held.numbers[is_same]] = self._num_updates
        self._write_some(held, is_same)

    def _write_some(self, held: Held, is_wanted: np.ndarray) -> None:
        """Of what is held, the pages that are newer than those on disk."""
        if not is_wanted.all():
            count = int(np.count_nonzero(is_wanted))
            wanted = torch.from_numpy(np.flatnonzero(is_wanted))
            held.records[:count] = held.records[wanted]
            held = Held(held.numbers[is_wanted], held.buffer, held.records.shape[1], self._dtype)
        held.is_changed = bool(len(held.numbers))
        self._let_go(held)

    # -- coming and going -------------------------------------------------------------------------

    def fill(self, states: States) -> None:
        """Take in what the chunks hold, and let them go."""
        runs = StateRun.all_of(states, self.home, self._names)
        self._store.lease([self.chunk])
        try:
            for run, following in zip(runs, [*runs[1:], None], strict=True):
                leased = [*run.chunks, *(following.chunks if following else ())]
                self._store.lease(leased)
                try:
                    self._fill_from(run, following)
                finally:
                    self._store.release(leased)
            self._settle()
        finally:
            self._store.release([self.chunk])
        for chunk in self.all_chunks(runs):
            retire(self._store, chunk)

    def all_chunks(self, runs: Sequence[StateRun]) -> list[Chunk]:
        return [self.chunk, *(chunk for run in runs for chunk in run.chunks)]

    def _fill_from(self, run: StateRun, following: StateRun | None) -> None:
        """The pages that begin in a run of elements; the last may end in the one behind it."""
        for pages in run.pages_that_begin(self._dtype.itemsize, GROUP_PAGES):
            held = self._new_held(pages)
            held.records.zero_()
            copy_values(self.home, held.records[:, 0], pages, to_matrix=True)
            for number, name in enumerate(self._names, 1):
                for source in (run, following):
                    if source is not None:
                        source.copy_state(name, held.records[:, number], pages, to_matrix=True)
            held.is_changed = True
            self._let_go(held)

    def leave(self, states: States) -> None:
        """All of it goes back to its chunks, with all updates."""
        self.flush()
        self._finish_sweep()
        self._settle()
        runs = StateRun.all_of(states, self.home, self._names)
        filled: list[Chunk] = []
        try:
            for run in runs:
                own = [] if self.chunk in filled else [self.chunk]
                for chunk in (*own, *(c for c in run.chunks if not c.is_empty)):
                    fill(self._store, chunk)
                    filled.append(chunk)
                self._give_back(run)
                self._store.release(filled[1:])
                del filled[1:]
        except BaseException:
            self._store.release(filled)
            for chunk in filled:
                retire(self._store, chunk)
            raise
        self._store.release(filled)
        self._records.free()

    def _give_back(self, run: StateRun) -> None:
        for pages in run.pages_that_touch(self._dtype.itemsize, GROUP_PAGES):
            held = self._new_held(pages)
            try:
                self._store.wait(self._records.read(pages, held.memory))
                self._bring_up(held, self._num_done[pages])
                copy_values(self.home, held.records[:, 0], pages, to_matrix=False)
                for number, name in enumerate(self._names, 1):
                    run.copy_state(name, held.records[:, number], pages, to_matrix=False)
            finally:
                held.buffer.release()

    def abandon(self) -> None:
        """It was not filled: nothing of it is needed."""
        for future, held in self._writing:
            future.exception()
            held.buffer.release()
        self._writing.clear()
        self._records.free()
