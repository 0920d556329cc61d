"""Functions on gradients that are split over the ranks, done where the parts are.

Clipping would otherwise gather every gradient twice. A function in place that treats every element
alike is run on this rank's part; every rank does the same. A norm is put together from the norms
of the parts, each part being the range of one rank: the ranges do not depend on stage or tier, so
neither does the norm. Anything else gathers the whole, as for any managed tensor.

[Note: readers of gradients]
A rank may read a gradient while others go on. What it reads must not change under it, so the first
change in place after a backward or a step waits until all ranks have come to theirs. That all did
the same is checked by the next `optimizer.step()`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeepo.chunks.store import ChunkStore
from zeepo.chunks.wholes import forget_copy
from zeepo.engine.managed import Home, home_of, plain_torch
from zeepo.engine.ranks import Ranks
from zeepo.engine.reduction import Reduction
from zeepo.engine.sharded import Sharded, Subject
from zeepo.engine.torch_functions import Function

ALIKE = frozenset(
    [
        "mul_",
        "div_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "clip_",
        "zero_",
        "neg_",
        "_foreach_mul_",
        "_foreach_div_",
        "_foreach_clamp_min_",
        "_foreach_clamp_max_",
        "_foreach_zero_",
        "_foreach_neg_",
    ]
)
"""In place, elementwise, the same for every element given numbers as arguments."""
NORMS = frozenset(("norm", "linalg_vector_norm", "vector_norm", "_foreach_norm"))
ALONE = "norm"
"""The method, which one rank may call for its log. Clipping calls the others, on every rank."""


class SplitGradients:
    """Runs functions on the parts of gradients."""

    def __init__(self, store: ChunkStore, ranks: Ranks, reduction: Reduction):
        self._store = store
        self._ranks = ranks
        self._reduction = reduction
        self._norms: dict[tuple[int, int], float] = {}
        """(PARAM chunk, slot) -> norm, as long as no gradient changes."""
        self._norm_order: tuple[float, int] | None = None
        self._num_norms = 0
        self._met_at: tuple[int, int] | None = None
        """The backward and the step after which all ranks have come to a change or a norm."""

    def _sharded_of(self, home: Home) -> Sharded | None:
        return self._ranks.by_grad_chunk.get(home.chunk.key)

    def run(self, func: Function, args: Any, kwargs: Any, managed: Sequence[Tensor]) -> Any:
        """The result, or NotImplemented when the whole is needed."""
        name = getattr(func, "__name__", "")
        home = home_of(managed[0]) if len(managed) == 1 else None
        if home is None or home.chunk.is_dirty:
            return NotImplemented
        sharded = self._sharded_of(home)
        if sharded is None or not covers(managed[0], home):
            return NotImplemented
        if name in ALIKE and _are_numbers(args[1:], kwargs):
            return self._run_alike(func, args, kwargs, managed[0], home, sharded)
        if name in NORMS:
            return self._norm(name, args, kwargs, home, sharded)
        return NotImplemented

    @property
    def _moment(self) -> tuple[int, int]:
        return self._reduction.num_backwards, self._ranks.num_steps

    def _wait_for_readers(self) -> None:
        """[Note: readers of gradients]"""
        if self._met_at != self._moment:
            self._ranks.meet("a change of the gradients")
            self._met_at = self._moment

    # -- in place ---------------------------------------------------------------------------------

    def _run_alike(
        self, func: Function, args: Any, kwargs: Any, grad: Tensor, home: Home, sharded: Sharded
    ) -> Any:
        self._wait_for_readers()
        self._ranks.step_facts.note_change(func.__name__, home.name, (*args[1:], *kwargs.values()))
        part = self._part(home, sharded)
        if part is not None:
            assert sharded.grad is not None
            assert sharded.grad.shard is not None
            shard = sharded.grad.shard
            self._store.lease([shard])
            try:
                with torch.no_grad(), plain_torch():
                    first = [self._part_tensor(home, sharded)]
                    is_list = isinstance(args[0], (list, tuple))
                    func(first if is_list else first[0], *args[1:], **kwargs)
                self._store.mark_changed(shard)
            finally:
                self._store.release([shard])
        self._reduction.gradient_changed(sharded)
        self._change_copy(func, args, kwargs, home)
        with plain_torch():
            torch.autograd.graph.increment_version([grad])
        return None if isinstance(args[0], (list, tuple)) else grad

    def _change_copy(self, func: Function, args: Any, kwargs: Any, home: Home) -> None:
        """A whole that somebody holds by its address is changed like its parts."""
        whole = home.chunk
        if not whole.leases or not whole.is_resident:
            forget_copy(self._store, whole)
            return
        with torch.no_grad(), plain_torch():
            first = [home.plain] if isinstance(args[0], (list, tuple)) else home.plain
            func(first, *args[1:], **kwargs)
        whole.version += 1
        whole.lower_version = whole.version

    def _part(self, home: Home, sharded: Sharded) -> tuple[int, int] | None:
        """Our elements of a gradient: where they begin in the shard, and how many they are."""
        slot = sharded.whole.layout.slots[home.index]
        part = sharded.own.intersect(slot.offset_bytes, slot.end_bytes)
        itemsize = home.plain.element_size()
        if not part.nbytes:
            return None
        return (part.low - sharded.own.low) // itemsize, part.nbytes // itemsize

    def _part_tensor(self, home: Home, sharded: Sharded) -> Tensor:
        part = self._part(home, sharded)
        assert part is not None
        assert sharded.grad is not None
        assert sharded.grad.shard is not None
        storage = sharded.grad.shard.storages[0]
        assert storage is not None
        empty = torch.empty(0, dtype=home.plain.dtype)
        return empty.set_(storage, part[0], (part[1],), (1,))

    # -- norms ------------------------------------------------------------------------------------

    def _norm(self, name: str, args: Any, kwargs: Any, home: Home, sharded: Sharded) -> Any:
        order = _order_of(args[1:], kwargs)
        if order is None:
            return NotImplemented
        if name == ALONE:
            norm = self._norm_of_whole(home, sharded, order)
        else:
            version = self._ranks.offers.num_gradient_changes
            if self._norm_order != (order, version):
                self._norms = self._all_norms(order)
                self._norm_order = (order, version)
                self._met_at = self._moment
            norm = self._norms[sharded.whole.key, home.index]
        value = torch.tensor(norm, dtype=home.plain.dtype.to_real())
        return [value] if name.startswith("_foreach") else value

    def _norm_of_whole(self, home: Home, sharded: Sharded, order: float) -> float:
        """The same number without the other ranks' doing."""
        slot = sharded.whole.layout.slots[home.index]
        itemsize = home.plain.element_size()
        parts = []
        self._store.lease([home.chunk])
        try:
            with torch.no_grad(), plain_torch():
                storage = home.plain.untyped_storage()
                for own in sharded.ranges:
                    part = own.intersect(slot.offset_bytes, slot.end_bytes)
                    start = (part.low - slot.offset_bytes) // itemsize
                    run = torch.empty(0, dtype=home.plain.dtype)
                    run.set_(storage, start if part.nbytes else 0, (part.nbytes // itemsize,), (1,))
                    parts.append(_norm_of_run(run, order))
        finally:
            self._store.release([home.chunk])
        return joined_norm(parts, order)

    def _all_norms(self, order: float) -> dict[tuple[int, int], float]:
        """Of every gradient there is, with one exchange."""
        homes = self._reduction.homes_with_gradient()
        mine = [self._part_norm(home, sharded, order) for sharded, home in homes]
        self._num_norms += 1
        told = self._ranks.network.collect(
            Subject.NORM, self._num_norms, struct.pack(f"<{len(mine)}d", *mine), "a gradient norm"
        )
        parts = [struct.unpack(f"<{len(mine)}d", fact) for fact in told]
        return {
            (sharded.whole.key, home.index): joined_norm([part[i] for part in parts], order)
            for i, (sharded, home) in enumerate(homes)
        }

    def _part_norm(self, home: Home, sharded: Sharded, order: float) -> float:
        if self._part(home, sharded) is None:
            return 0.0
        assert sharded.grad is not None
        assert sharded.grad.shard is not None
        self._store.lease([sharded.grad.shard])
        try:
            with torch.no_grad(), plain_torch():
                return _norm_of_run(self._part_tensor(home, sharded), order)
        finally:
            self._store.release([sharded.grad.shard])


def _norm_of_run(run: Tensor, order: float) -> float:
    return torch.linalg.vector_norm(run, order).item() if run.numel() else 0.0


def joined_norm(parts: Sequence[float], order: float) -> float:
    """The norm of a whole from the norms of its parts, in the order of the ranks."""
    if any(math.isnan(part) for part in parts):
        return math.nan
    if math.isinf(order):
        return max(parts)
    if order == 1.0:
        return sum(parts)
    if order == 2.0:
        return math.sqrt(sum(part * part for part in parts))
    return float(sum(part**order for part in parts) ** (1.0 / order))


def covers(tensor: Tensor, home: Home) -> bool:
    """The gradient itself, not a view of some of it."""
    return tensor.numel() == home.plain.numel() and tensor.stride() == home.plain.stride()


def _are_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return all(
        isinstance(value, (int, float, type(None))) or _is_number_tensor(value)
        for value in (*args, *kwargs.values())
    )


def _is_number_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and home_of(value) is None and value.dim() == 0


def _order_of(args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Which norm is asked for; None for what is not a norm of the whole tensor to one number."""
    others = {k: v for k, v in kwargs.items() if k not in ("p", "ord", "dtype")}
    if any(v not in (None, False) for v in others.values()) or len(args) > 1:
        return None
    if kwargs.get("dtype") is not None:
        return None
    order = args[0] if args else kwargs.get("ord", kwargs.get("p", 2.0))
    if order == "fro":
        order = 2.0
    return float(order) if isinstance(order, (int, float)) and order > 0 else None
