"""Leases for autograd's kernels.

[Note: backward]
A backward node computes with tensors it saved in forward, weights among them, and it does so in
C++ where nothing intercepts. So after each function that touched something managed we walk the
nodes it created and put a pre-hook and a hook on those that saved a managed storage: the chunk is
leased just before the node runs and released just after. Nodes that do not need the values
(embedding, bias) cost nothing. Where another mechanism has packed what a node saved (activation
checkpointing), we cannot see what it is and lease all the function touched.

If a node raises, its hook never runs; such leases are given back at the next function outside
backward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zeepo.chunks.storages import address, is_in_backward
from zeepo.chunks.store import Chunk, ChunkStore
from zeepo.engine.managed import storage_of
from zeepo.engine.saved import Handle, Weight
from zeepo.engine.torch_functions import tensors_in
from zeepo.engine.turns import Turns
from zeepo.engine.warm_gradients import Memory, WarmGradient, can_begin, is_known
from zeepo.errors import SessionError
from zeepo.sabotage import sabotaged

_ACCUMULATE = "torch::autograd::AccumulateGrad"
WORTH_EXPECTING_BYTES = 4 << 20
_VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
_MAKE_NOTHING = frozenset(f"{name}Backward{number}" for name in _VIEWS for number in range(3))
"""Nodes that hand on the gradient they get, mostly: its memory is there already."""
_saved_attributes: dict[type, tuple[str, ...]] = {}


class NodeLeases:
    """The leases held for backward nodes that are running."""

    def __init__(self, store: ChunkStore, by_storage: Mapping[int, Chunk]):
        self._store = store
        self._by_storage = by_storage
        self._held: list[tuple[int, _NodeLease]] = []
        """With the thread whose backward holds it."""
        self.table_behind: Callable[[Tensor], Memory | None] | None = None
        """The table that a parameter is, where there are such."""
        self.turns: Turns | None = None
        """Who runs, while several micro-batches pass the units together."""

    def refuse_inside_accumulate(self, what: str) -> None:
        """Other micro-batches are in the middle of the model."""
        if self.turns is not None:
            raise SessionError(
                f"{what} inside the function given to session.accumulate: the other micro-batches "
                "are in the middle of the model. Call it after session.accumulate."
            )

    def attach(self, node: Any, chunks: Sequence[Chunk], coming_bytes: int = 0) -> _NodeLease:
        lease = _NodeLease(self, tuple(chunks), coming_bytes)
        node.register_prehook(lease.before)
        node.register_hook(lease.after)
        return lease

    def attach_to_running(self, chunk: Chunk) -> bool:
        """Lease for the node that is running, if it is one written in Python, from now on.

        What such a node saved is seen only here when somebody has packed it: calling the function
        is not a function of torch's, so nothing was attached in forward.
        """
        node: Any = torch._C._current_autograd_node()
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        # Nodes of a thread end in turn: what an outer one holds, this one has as well.
        is_held = any(t == get_ident() and chunk in lease.chunks for t, lease in self._held)
        if not is_held:
            self.enter(self.attach(node, [chunk]))
        return True

    def attach_to_new(
        self, tensors: Iterable[Tensor], first_node: int, touched: Sequence[Chunk]
    ) -> None:
        """Lease for every node made since `first_node` behind `tensors` that needs it."""
        for node in new_nodes(tensors, first_node):
            saved = chunks_saved_by(node, self._by_storage, touched)
            coming_bytes = large_gradient_bytes(node)
            if saved or coming_bytes:
                lease = self.attach(node, saved, coming_bytes)
                lease.known_bytes = known_gradient_bytes(node) if coming_bytes else 0
                lease.embedding = looked_up_by(node) if lease.known_bytes else None

    def before_function(self, chunks: Sequence[Chunk]) -> None:
        """A function outside backward, or recomputed inside it, is about to use chunks."""
        if self.turns is not None:
            self.turns.about_to_use(chunks)
        self.give_back_stale()

    def enter(self, lease: _NodeLease) -> None:
        if self.turns is not None:
            self.turns.about_to_use(lease.chunks)
        self._store.lease(lease.chunks)
        self._held.append((get_ident(), lease))
        lease.first_node = torch._C._autograd._get_sequence_nr()
        if lease.coming_bytes and not self._warm_up(lease):
            self._store.expect(lease.coming_bytes)
        if sabotaged("backward.lease"):
            for chunk in lease.chunks:
                for _, storage in chunk.present():
                    ctypes.memset(storage.data_ptr(), 0, storage.nbytes())

    def _warm_up(self, lease: _NodeLease) -> bool:
        """Whether what the node is about to make has memory already; the rest of it is expected."""
        if (table := self._table_of(lease)) is not None and can_begin():
            lease.warm = WarmGradient(lease.known_bytes, table)
            lease.warm.begin()
            return True
        spares = self._store.moves.spares
        if not spares.has(lease.known_bytes) or not can_begin():
            return False
        rest_bytes = lease.coming_bytes - lease.known_bytes
        if rest_bytes >= WORTH_EXPECTING_BYTES:
            self._store.expect(rest_bytes)
            if not spares.has(lease.known_bytes):
                return False
        lease.warm = WarmGradient(lease.known_bytes, self)
        lease.warm.begin()
        return True

    def _table_of(self, lease: _NodeLease) -> Memory | None:
        if lease.embedding is None or self.table_behind is None:
            return None
        return self.table_behind(lease.embedding)

    def take_zeros(self, rows: Tensor) -> UntypedStorage | None:
        """Memory that was kept is not zeros."""
        return None

    def take(self, nbytes: int) -> UntypedStorage | None:
        """Memory for a gradient, unless it had to go since the node began."""
        memory = self._store.moves.spares.take(nbytes)
        if memory is None:
            self._store.expect(nbytes)
        elif self._store.budget is not None:
            self._store.budget.note_lent(nbytes)
        return memory

    def expect(self, nbytes: int) -> None:
        """A gradient takes other memory after all."""
        self._store.expect(nbytes)

    def is_managed(self, tensor: Tensor) -> bool:
        return address(storage_of(tensor)) in self._by_storage

    def leave(self, lease: _NodeLease, grads: Any) -> None:
        lease.cool_down()
        if torch.is_grad_enabled():  # create_graph: backward itself made nodes that save weights
            self.attach_to_new(tensors_in(grads), lease.first_node, lease.chunks)
        entry = (get_ident(), lease)
        if entry in self._held:
            self._held.remove(entry)
            self._store.release(lease.chunks)

    def forget_all(self) -> None:
        """The store has taken every lease back."""
        for _, lease in self._held:
            lease.cool_down()
        self._held.clear()

    def give_back_stale(self) -> None:
        """Outside backward no node of this thread runs: what it holds was left by an exception."""
        if self._held and not is_in_backward():
            self.give_back_of({get_ident()})

    def give_back_of(self, threads: Container[int | None]) -> None:
        """Nodes of these threads do not run any more."""
        for entry in [entry for entry in self._held if entry[0] in threads]:
            self._held.remove(entry)
            entry[1].cool_down()
            self._store.release(entry[1].chunks)


class _NodeLease:
    def __init__(self, leases: NodeLeases, chunks: tuple[Chunk, ...], coming_bytes: int):
        self.leases = leases
        self.chunks = chunks
        self.coming_bytes = coming_bytes
        """The size of the gradients the node will make of parameters, where that is much."""
        self.known_bytes = 0
        """Of them, the size of the one that can be made in memory that is there."""
        self.embedding: Tensor | None = None
        """The parameter whose rows the node's function looked up, if it is one of those."""
        self.warm: WarmGradient | None = None
        """While such a gradient is made in memory that was there."""
        self.first_node = 0

    def cool_down(self) -> None:
        if self.warm is not None:
            self.warm.end()
            self.warm = None

    def before(self, grads: Any) -> None:
        self.leases.enter(self)

    def after(self, grad_inputs: Any, grad_outputs: Any) -> None:
        self.leases.leave(self, grad_inputs)


def new_nodes(tensors: Iterable[Tensor], first_sequence: int) -> list[Any]:
    """The backward nodes behind `tensors` that were created since `first_sequence`."""
    found: list[Any] = []
    seen: set[Any] = set()
    stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen or node.name() == _ACCUMULATE or node._sequence_nr() < first_sequence:
            continue
        seen.add(node)
        found.append(node)
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found


def large_gradient_bytes(node: Any) -> int:
    """What a node will make for parameters, which torch allocates before we can take it over."""
    if node.name() in _MAKE_NOTHING:
        return 0
    nbytes = sum(_gradients_of(node))
    return nbytes if nbytes >= WORTH_EXPECTING_BYTES else 0


def known_gradient_bytes(node: Any) -> int:
    """The size of the one large gradient of a parameter that a node makes in a known way."""
    large = [nbytes for nbytes in _gradients_of(node) if nbytes >= WORTH_EXPECTING_BYTES]
    return large[0] if len(large) == 1 and is_known(node) else 0


def looked_up_by(node: Any) -> Tensor | None:
    """The parameter behind a node of F.embedding."""
    if node.name() != "EmbeddingBackward0":
        return None
    return _parameter_behind(node.next_functions[0][0])


def _gradients_of(node: Any) -> list[int]:
    """The sizes of what a node makes for parameters."""
    variables = (_parameter_behind(parent) for parent, _ in node.next_functions)
    return [v.numel() * v.element_size() for v in variables if v is not None]


def _parameter_behind(node: Any) -> Tensor | None:
    """The leaf that a node accumulates into, itself or through views and one other node."""
    while node is not None and node.name() != _ACCUMULATE and len(node.next_functions) == 1:
        is_view, node = node.name() in _MAKE_NOTHING, node.next_functions[0][0]
        if not is_view:
            break
    return node.variable if node is not None and node.name() == _ACCUMULATE else None


def chunks_saved_by(
    node: Any, by_storage: Mapping[int, Chunk], touched: Sequence[Chunk]
) -> list[Chunk]:
    """The chunks whose bytes a node will read in backward."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return list(touched)
    names = _saved_attributes.get(type(node))
    if names is None:
        names = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
        _saved_attributes[type(node)] = names
    found: dict[int, Chunk] = {}
    for name in names:
        saved = getattr(node, name)
        for item in saved if isinstance(saved, (list, tuple)) else (saved,):
            data = getattr(item, "data", None)
            data = data.tensor if isinstance(data, Weight) else data
            if isinstance(data, Tensor):
                if data.layout is torch.strided:
                    chunk = by_storage.get(address(storage_of(data)))
                    if chunk is not None:
                        found[chunk.key] = chunk
            elif data is not None and not isinstance(data, Handle):
                return list(touched)
    return list(found.values())
