"""Which embeddings are tables, and who gets at them.

A parameter becomes a table when it is large, on disk with its states, and a whole step went by in
which it was only looked up, by few rows. When somebody needs all of it, it comes back to its
chunks; after that it takes twice as many such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import RLock
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeepo.chunks.chunk import Chunk, Kind
from zeepo.engine.managed import Home, home_of, plain_torch
from zeepo.engine.manager import Manager
from zeepo.engine.step import OptimizerStep
from zeepo.engine.table import Table
from zeepo.engine.table_pages import pages_of_rows
from zeepo.engine.torch_functions import Function
from zeepo.errors import BudgetError, CorruptionError, DiskError
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.mapping import PAGE_BYTES
from zeepo.memory.records import Records
from zeepo.optim.catch_up import PastUpdate
from zeepo.optim.shadow import Recipe

LARGEST_SHARE = 1 / 8
"""Of the pages of a table, the most that are looked up in a step."""
ALIGNED_ELEMENTS = 16
"""So that every page ends where torch's kernels would not notice (chunks/layout.py)."""
_EXACT = (torch.float32, torch.float64)
_NOT_ROWS_ALONE = ("max_norm", "scale_grad_by_freq", "sparse")


@dataclass
class _Candidate:
    """What is known of a parameter that may become a table."""

    num_wanted: int = 1
    """Steps in a row in which only few rows are to be looked up, before it becomes one."""
    num_good: int = 0
    num_pages: int = 0
    """Looked up in this step."""
    is_used_otherwise: bool = False
    never: bool = False
    """There was no room on disk."""

    def end_step(self, num_all: int) -> None:
        is_good = not self.is_used_otherwise and self.num_pages <= LARGEST_SHARE * num_all
        self.num_good = self.num_good + 1 if is_good and self.num_pages else 0
        self.num_pages, self.is_used_otherwise = 0, False


class Tables:
    """The tables of one session, which updates in backward."""

    def __init__(self, manager: Manager, step: OptimizerStep, least_bytes: int):
        self._manager = manager
        self._store = manager.store
        self._step = step
        self._least_bytes = least_bytes
        self._tables: dict[int, Table] = {}
        """PARAM chunk -> its table."""
        self._states: dict[int, Mapping[str, Tensor]] = {}
        """PARAM chunk -> the states that the user sees."""
        self._candidates: dict[int, _Candidate] = {}
        self._hooks: dict[int, Callable[[], None]] = {}
        """PARAM chunk -> what stands before its use."""

    def of(self, home: Home | None) -> Table | None:
        return None if home is None else self._tables.get(home.chunk.key)

    def behind(self, parameter: Tensor) -> Table | None:
        """The table that a parameter is."""
        return self.of(home_of(parameter))

    # -- looking up -------------------------------------------------------------------------------

    def lookup(self, func: Function, args: Any, kwargs: Any, homes: list[Home]) -> Lookup | None:
        """How a function gets its rows, if it is a lookup in a table or in what may become one."""
        if func is not F.embedding or len(homes) != 1 or not _takes_rows_alone(args, kwargs):
            return None
        if args[1] is not homes[0].parameter or not self._may_be(homes[0]):
            return None
        return Lookup(self, homes[0], args[0])

    def begin(self, home: Home, rows: Tensor) -> tuple[Table | None, Callable[[], None] | None]:
        """Of a lookup: the table its rows come from, or what has to be done at its end."""
        num_rows, row_bytes = home.plain.shape[0], _nbytes(home) // home.plain.shape[0]
        num_pages = len(pages_of_rows(rows, num_rows, row_bytes))
        is_few = num_pages <= LARGEST_SHARE * _num_pages(home)
        table = self._tables.get(home.chunk.key)
        if table is not None:
            if home.chunk.before_use is not self._hooks[home.chunk.key]:
                home.chunk.before_use()  # type: ignore[misc]  # refused between backward and step
            return (table if is_few else None), None
        candidate = self._candidates.setdefault(home.chunk.key, _Candidate())
        candidate.num_pages += num_pages
        if is_few and candidate.num_good >= candidate.num_wanted and not candidate.never:
            table = self._make(home, candidate)
            if table is not None:
                return table, None
        return None, partial(self._watch, home.chunk, candidate)

    def _may_be(self, home: Home) -> bool:
        chunk, plain = home.chunk, home.plain
        return (
            _nbytes(home) >= self._least_bytes
            and plain.dtype in _EXACT
            and plain.dim() == 2
            and plain.is_contiguous()
            and plain.numel() % ALIGNED_ELEMENTS == 0
            and len(chunk.layout.slots) == 1
            and isinstance(chunk.home, DiskTier)
            and isinstance(self._manager.home_tier[Kind.STATE], DiskTier)
            and self._manager.node_leases.turns is None
            and torch._C._functorch.maybe_current_level() is None
            and not torch._C._len_torch_dispatch_stack()
        )

    def _watch(self, chunk: Chunk, candidate: _Candidate) -> None:
        """Another use than a lookup, before the next update, is to be noted."""

        def note() -> None:
            chunk.before_use = None
            candidate.is_used_otherwise = True

        if chunk.before_use is None:
            self._hooks[chunk.key] = chunk.before_use = note

    def stop_watching(self, chunk: Chunk) -> None:
        """The next use of a chunk is not the program's."""
        is_ours = chunk.before_use is self._hooks.get(chunk.key)
        if is_ours and chunk.key not in self._tables:
            chunk.before_use = None

    def before_update(self, home: Home) -> None:
        """A chunk that is not a table is about to be updated, with a gradient as torch made it."""
        self.stop_watching(home.chunk)
        candidate = self._candidates.get(home.chunk.key)
        if candidate is not None:
            candidate.end_step(_num_pages(home))

    # -- updating ---------------------------------------------------------------------------------

    def count_update(self, table: Table, recipe: Recipe) -> PastUpdate | None:
        """What one step does to a table; None when it has to be done in another way."""
        seen = self._states_of(table.home)
        known = self._states[table.chunk.key]
        is_as_before = seen.keys() == known.keys() and all(seen[n] is known[n] for n in seen)
        if not is_as_before or recipe.attributes.get("grad_scale") is not None:
            return None
        return self._step.count_update(recipe, table.home, len(known))

    def _states_of(self, home: Home) -> dict[str, Tensor]:
        """The states that the user sees, but for scalars."""
        assert home.parameter is not None
        entry = self._step.optimizer.state.get(home.parameter, {})
        return {name: value for name, value in entry.items() if home_of(value) is not None}

    # -- coming and going -------------------------------------------------------------------------

    def _make(self, home: Home, candidate: _Candidate) -> Table | None:
        """A table of a parameter, unless its states are not what they have to be."""
        self.stop_watching(home.chunk)
        if home.chunk.before_use is not None or home.grad is not None:
            return None
        if any(c.leases or c.raw_holds for c in self._step.changed_by_update(home.chunk)):
            return None  # somebody has an address of it
        states = self._states_of(home)
        dtypes = {self._step.states.dtype(home, name) for name in states}
        if not self._step.has_all_states(home, len(states)) or dtypes - {home.plain.dtype}:
            return None
        tier = home.chunk.home
        assert isinstance(tier, DiskTier)
        record_bytes = PAGE_BYTES * (1 + len(states))
        table = None
        try:
            self._step.states.settle_wholes(home.chunk)
            records = Records(tier, home.chunk.label + " by rows", _num_pages(home), record_bytes)
            table = Table(self._store, home, list(states), records)
            table.fill(self._step.states)
        except CorruptionError:
            raise
        except (BudgetError, DiskError):  # no room for it beside the chunks: they stay as they are
            candidate.never = True
            if table is not None:
                table.abandon()
            return None
        key = home.chunk.key
        self._tables[key], self._states[key] = table, states
        hook = self._hooks[key] = partial(self._leave, table)
        for chunk in self._step.changed_by_update(home.chunk):
            chunk.before_use = hook
        return table

    def _leave(self, table: Table) -> None:
        """Somebody uses all of a parameter, or of its states."""
        key = table.chunk.key
        with self._store.lock:
            if self._tables.get(key) is not table:
                return  # another thread was faster
            guarded = self._step.changed_by_update(table.chunk)
            for chunk in guarded:
                chunk.before_use = None
            try:
                table.leave(self._step.states)
            except BaseException:
                for chunk in guarded:
                    chunk.before_use = self._hooks[key]
                raise
            del self._tables[key], self._states[key], self._hooks[key]
            candidate = self._candidates[key]
            candidate.num_wanted, candidate.num_good = 2 * candidate.num_wanted, 0

    def let_go(self) -> bool:
        """Room is short: what tables hold between two uses goes to disk; whether that was any."""
        return sum(table.let_go() for table in self._tables.values()) > 0

    @property
    def lock(self) -> RLock:
        """Held while rows are used."""
        return self._store.lock

    def num_pages(self) -> int:
        """How many pages are in tables."""
        return sum(_num_pages(table.home) for table in self._tables.values())


class Lookup:
    """Entered while a lookup runs: its rows are there, or its chunk has to be leased.

    Rows of a table are at their places for one lookup at a time, whichever thread asks.
    """

    def __init__(self, tables: Tables, home: Home, rows: Tensor):
        self._tables = tables
        self._home = home
        self._rows = rows
        self._table: Table | None = None
        self._at_end: Callable[[], None] | None = None

    def __enter__(self) -> list[Chunk]:
        lock = self._tables.lock
        lock.acquire()
        try:
            self._table, self._at_end = self._tables.begin(self._home, self._rows)
            if self._table is not None:
                self._table.show(self._rows)
        except BaseException:
            lock.release()
            raise
        if self._table is not None:
            return []
        lock.release()
        return [self._home.chunk]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._table is not None:
            try:
                self._table.hide()
            finally:
                self._tables.lock.release()
        if self._at_end is not None:
            with self._tables.lock:
                self._at_end()


def _takes_rows_alone(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of F.embedding only copies rows, and gets a gradient of all rows."""
    is_plain = len(args) == 2 and not any(kwargs.get(name) for name in _NOT_ROWS_ALONE)
    with plain_torch():
        return is_plain and type(args[0]) is Tensor and not args[0].dtype.is_floating_point


def _nbytes(home: Home) -> int:
    return home.plain.numel() * home.plain.element_size()


def _num_pages(home: Home) -> int:
    return -(-_nbytes(home) // PAGE_BYTES)
