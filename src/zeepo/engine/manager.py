"""The manager: runs functions on managed tensors and knows every parameter's chunks.

It answers what `managed.py` asks: run this with its chunks leased, hand out the gradient, replace
the data. It owns the store and the table of storages; it knows nothing of optimizers or sessions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeepo.chunks.layout import Layout, pack
from zeepo.chunks.storages import address, fills_storage
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.chunks.wholes import be_copy
from zeepo.engine.backward import NodeLeases
from zeepo.engine.copies import Copies
from zeepo.engine.first_batch import FirstBatch
from zeepo.engine.gradients import Gradients
from zeepo.engine.managed import (
    Home,
    home_of,
    mark_managed,
    mark_ordinary,
    plain_torch,
    storage_of,
    write_autograd_grad,
)
from zeepo.engine.ranks import Ranks
from zeepo.engine.raw_leases import RawLeases
from zeepo.engine.reduction import Reduction
from zeepo.engine.sharded import Sharded
from zeepo.engine.shards import GatherTier
from zeepo.engine.split_gradients import SplitGradients
from zeepo.engine.torch_functions import Function, tensors_in, written_in_place
from zeepo.errors import UnsupportedError
from zeepo.memory.tier import Tier
from zeepo.sabotage import sabotaged

Lookup = AbstractContextManager[list[Chunk]]
"""Around a function that looks up rows: tells what has to be leased for that."""


class Manager:
    """Managed tensors of one session."""

    is_building = False
    """Whether the model is still being built: then its memory may be exchanged."""

    def __init__(self, store: ChunkStore, homes_of_kind: dict[Kind, Tier | None]):
        self.store = store
        self.home_tier = homes_of_kind
        self.homes: dict[int, Home] = {}
        """id(parameter) -> its home; parameters live as long as the session."""
        self.slots: dict[int, list[Home]] = {}
        """PARAM chunk key -> the homes of its slots, in order."""
        self.by_storage: dict[int, Chunk] = {}
        """Address of a storage -> the chunk its bytes belong to."""
        self.grad_chunks: dict[int, Chunk] = {}
        """PARAM chunk key -> its GRAD chunk."""
        self.gradients = Gradients(self, store, self.grad_chunk)
        self.find_lookup: Callable[[Function, Any, Any, list[Home]], Lookup | None] | None = None
        """How a function finds rows of an embedding that is not in its chunk."""
        self.ranks: Ranks | None = None
        self.reduction: Reduction | None = None
        self._split_gradients: SplitGradients | None = None
        self.node_leases = NodeLeases(store, self.by_storage)
        self.copies = Copies(store)
        self.raw_leases = RawLeases(store, self._mark_changed)
        self._hook_handles: dict[int, Any] = {}
        """id(parameter) -> the handle of the hook that takes its gradients over."""

    # -- parameters -------------------------------------------------------------------------------

    def adopt_chunk(self, label: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> Chunk:
        """Make one PARAM chunk of the given parameters, which keep the memory they have."""
        sizes = [(name, p.numel() * p.element_size()) for name, p in parameters]
        layout = pack(sizes)
        chunk = self.store.create(Kind.PARAM, label, layout, self.home_tier[Kind.PARAM])
        self.slots[chunk.key] = [
            self._adopt_parameter(chunk, index, name, parameter)
            for index, (name, parameter) in enumerate(parameters)
        ]
        if self.ranks is not None:
            self.ranks.add(chunk)
        for home in self.slots[chunk.key]:  # gradients that are there already
            self.gradients.absorb(home)
        return chunk

    def use_ranks(self, ranks: Ranks, count: Callable[[], int], first: FirstBatch) -> None:
        """Everything adopted from now on is shared with the other ranks."""
        self.ranks = ranks
        ranks.slots = self.slots
        self.reduction = Reduction(self.store, ranks, count, first)
        self._split_gradients = SplitGradients(self.store, ranks, self.reduction)
        self.gradients.use_ranks(self.reduction)

    def _adopt_parameter(self, chunk: Chunk, index: int, name: str, p: nn.Parameter) -> Home:
        home = home_of(p)
        is_lazy = home is not None and home.manager is not None  # built inside zeepo.lazy
        if home is not None and home.manager is not None:
            self.store.expect(p.numel() * p.element_size())
            home = home.manager.hand_over(p)
        with plain_torch():
            if not fills_storage(p):
                p.data = p.data.clone(memory_format=torch.preserve_format)
            storage = p.untyped_storage()
            self.store.adopt(chunk, index, storage, copy=is_lazy)
            if home is None:
                home = Home(self, chunk, index, name, p.detach())
        home.manager, home.chunk, home.index, home.name = self, chunk, index, name
        home.parameter = p
        self.homes[id(p)] = home
        self.by_storage[address(storage)] = chunk
        mark_managed(p, home)
        self._watch_gradient(home)
        return home

    def adopt_aliases(self, aliases: Sequence[tuple[Tensor, nn.Parameter]]) -> None:
        """Tensors made before init that share a parameter's storage."""
        for tensor, parameter in aliases:
            home = self.homes[id(parameter)]
            if tensor is home.plain:
                continue
            storage = home.chunk.storages[home.index]
            if storage is not None and address(storage) == address(storage_of(tensor)):
                mark_managed(tensor, home)

    def home(self, parameter: Tensor) -> Home | None:
        return self.homes.get(id(parameter))

    def parameter_home(self, storage: torch.UntypedStorage) -> Home | None:
        """The home of the parameter whose bytes a storage holds."""
        chunk = self.by_storage.get(address(storage))
        if chunk is None:
            return None
        for home in self.slots.get(chunk.key, ()):
            own = chunk.storages[home.index]
            if own is not None and address(own) == address(storage):
                return home
        return None

    def grad_chunk(self, home: Home) -> Chunk:
        """The GRAD chunk with the same slots as a parameter's PARAM chunk."""
        chunk = self.grad_chunks.get(home.chunk.key)
        if chunk is None:
            tier = self.home_tier[Kind.GRAD]
            if self.ranks is not None:
                assert self.reduction is not None
                tier = self.reduction.grad_tier(self.ranks.sharded[home.chunk.key])
            chunk = self.store.create(
                Kind.GRAD, home.chunk.label + ".grad", home.chunk.layout, tier
            )
            self.grad_chunks[home.chunk.key] = chunk
            if self.ranks is not None:
                be_copy(self.store, chunk)
                chunk.may_be_prefetched = False  # others may be about to change theirs
                self.ranks.by_grad_chunk[chunk.key] = self.ranks.sharded[home.chunk.key]
        return chunk

    def sharded_states(self, chunk: Chunk) -> Sharded | None:
        """How a PARAM chunk is split over ranks, if its optimizer state is."""
        if self.ranks is None or not self.ranks.stages.splits(Kind.STATE):
            return None
        return self.ranks.sharded[chunk.key]

    def new_state_chunk(self, label: str, layout: Layout) -> Chunk:
        chunk = self.store.create(Kind.STATE, label, layout, self.home_tier[Kind.STATE])
        chunk.is_part = self.ranks is not None and self.ranks.stages.splits(Kind.STATE)
        return chunk

    def _watch_gradient(self, home: Home) -> None:
        """See to it that each gradient is taken over as soon as autograd has made it."""
        p = home.parameter
        assert p is not None
        if not p.requires_grad or id(p) in self._hook_handles:
            return
        reference = weakref.ref(home)

        def take_over(_: Tensor) -> None:
            target = reference()
            if target is not None and target.manager is not None:
                self.gradients.take_over(target)

        with plain_torch():
            handle = p.register_post_accumulate_grad_hook(take_over)  # type: ignore[no-untyped-call]
            self._hook_handles[id(p)] = handle

    # -- running functions ------------------------------------------------------------------------

    def run(self, func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
        """Call `func` with the chunks of its managed arguments leased."""
        homes = [home for home in map(home_of, managed) if home is not None]
        chunks = list({home.chunk.key: home.chunk for home in homes}.values())
        self.node_leases.before_function(chunks)
        self.raw_leases.end_those_of_the_dead()
        self.copies.count_out_ended()
        self.raw_leases.settle(chunks)
        if self._split_gradients is not None:
            result = self._split_gradients.run(func, args, kwargs, managed)
            if result is not NotImplemented:
                self.raw_leases.look_again()
                return result
        lookup = self.find_lookup and self.find_lookup(func, args, kwargs, homes)
        with lookup or nullcontext(chunks) as chunks, plain_torch():
            self.store.lease(chunks)
            try:
                versions = [_version(t) for t in managed]
                first_node = torch._C._autograd._get_sequence_nr()
                result = func(*args, **kwargs)
                written = written_in_place(func, args, managed)
                self._note_changes(written, managed, homes, versions)
                if torch._C._functorch.maybe_current_level() is None:
                    self.finish(result, (args, kwargs), homes, chunks, first_node)
                else:  # inside torch.func: what wraps our tensors cannot be followed
                    for home in homes:
                        self.lease_until_step(home)
            finally:
                self.store.release(chunks)
        self.raw_leases.look_again()
        return result

    def finish(
        self, result: Any, inputs: Any, homes: list[Home], chunks: list[Chunk], first_node: int
    ) -> None:
        """After a function: views become managed, backward nodes get their leases."""
        outputs = list(tensors_in(result))
        for out in outputs:
            if type(out) is Tensor and out.layout is torch.strided:
                self._manage_alias(out, homes)
        if not torch.is_grad_enabled():
            return
        for home in homes:
            if home.parameter is not None:
                self._watch_gradient(home)
        self.node_leases.attach_to_new([*outputs, *tensors_in(inputs)], first_node, chunks)

    def _manage_alias(self, out: Tensor, homes: list[Home]) -> None:
        where = address(out.untyped_storage())
        for home in homes:
            storage = home.chunk.storages[home.index]
            if storage is not None and address(storage) == where:
                mark_managed(out, home)
                return

    def _note_changes(
        self, written: Iterable[Tensor], managed: list[Tensor], homes: list[Home], before: list[int]
    ) -> None:
        """Version counters tell what was changed; some functions in place do not count theirs."""
        if sabotaged("dirty.mark"):
            return
        written_ids = {id(t) for t in written}
        for tensor, home, version in zip(managed, homes, before, strict=True):
            if id(tensor) in written_ids or _version(tensor) != version:
                self._mark_changed(home.chunk)

    def _mark_changed(self, chunk: Chunk) -> None:
        """The user's code changed a leased chunk."""
        ranks = None if self.ranks is None or self.ranks.is_closing else self.ranks
        if ranks is not None and isinstance(chunk.home, GatherTier):
            ranks.whole_changed(chunk)
            return
        self.store.mark_changed(chunk)
        if ranks is not None:
            ranks.changed_by_hand(chunk)

    # -- what managed tensors ask -----------------------------------------------------------------

    def read_grad(self, home: Home) -> Tensor | None:
        return self.gradients.read(home)

    def write_grad(self, home: Home, value: Tensor | None) -> None:
        self.raw_leases.settle()
        self.gradients.write(home, value)
        self.raw_leases.look_again()

    def lease_for_life_of(self, home: Home, obj: object) -> None:
        self.raw_leases.for_life_of(home, obj)

    def lease_until_step(self, home: Home) -> None:
        self.raw_leases.until_step(home)

    def lease_for_running_function(self, home: Home) -> bool:
        """Lease until the user's autograd.Function that backward runs is done; whether one runs."""
        return self.node_leases.attach_to_running(home.chunk)

    def replace_data(self, home: Home, tensor: Tensor, value: Tensor) -> None:
        """`tensor.data = value`: the values (and strides) of `value` go into the slot."""
        with torch.no_grad():
            value_home = home_of(value)
            if value_home is not None:
                if value_home.chunk is home.chunk and value_home.index == home.index:
                    return
                value = value.detach().clone(memory_format=torch.preserve_format)
        if value.dtype != home.plain.dtype or value.numel() != home.plain.numel():
            raise UnsupportedError(
                f"{home.name} cannot change from {tuple(home.plain.shape)} {home.plain.dtype} to "
                f"{tuple(value.shape)} {value.dtype} (model.half(), model.to(dtype), p.data = ...) "
                "while a session is open: its place has a fixed size. Change the model "
                "before zeepo.init, or close the session first."
            )
        storage = home.chunk.storages[home.index]
        assert storage is not None
        self.store.lease([home.chunk])
        try:
            with torch.no_grad(), plain_torch():
                stride = torch.empty_like(value).stride()
                alias = torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, stride)
                alias.copy_(value)
                setter: Any = Tensor.data
                setter.__set__(tensor, alias)
                if home.parameter is tensor or home_of(tensor) is home:
                    home.plain = alias
                self._mark_changed(home.chunk)
        finally:
            self.store.release([home.chunk])

    def copy_of(self, home: Home, tensor: Tensor) -> Tensor:
        """An ordinary copy that outlives the call: inside the budget, or on disk."""
        return self.copies.make(home, tensor)

    def copied(self, original: Home, copy: Tensor) -> None:
        """A deep copy was made: an ordinary tensor."""

    # -- the end ----------------------------------------------------------------------------------

    def stop_watching(self) -> None:
        """Take in the last gradients; no more are expected."""
        self.node_leases.give_back_stale()
        self.raw_leases.end_all()
        for handle in self._hook_handles.values():
            handle.remove()
        for home in self.homes.values():
            self.gradients.absorb(home)
            contribution = home_of(home.contribution)
            if contribution is not None:  # of `no_sync`: the user's to get back
                contribution.chunk.is_part = False

    def give_back(self) -> None:
        """Every managed tensor becomes ordinary again, with its current values."""
        for home in self.homes.values():
            p = home.parameter
            assert p is not None
            grad, home.grad = home.grad, None
            self.store.free_from_store(home.chunk, home.index)
            home.manager = None
            mark_ordinary(p)
            if home.contribution is not None:  # of `no_sync`: this rank's own, as under DDP
                grad, home.contribution = home.contribution, None
            if grad is not None:
                self._give_back_grad(p, grad)
        self.homes.clear()
        self.slots.clear()
        self.by_storage.clear()

    def hand_over(self, parameter: nn.Parameter) -> Home:
        """Let one parameter go, with its bytes in memory of its own. Its views stay managed: they
        belong to whoever the home belongs to next."""
        home = self.homes.pop(id(parameter))
        handle = self._hook_handles.pop(id(parameter), None)
        if handle is not None:
            handle.remove()
        storage = home.chunk.storages[home.index]
        assert storage is not None
        self.store.free_from_store(home.chunk, home.index, in_buffer=True)
        del self.by_storage[address(storage)]
        grad, home.grad = home.grad, None
        if grad is not None:
            self._give_back_grad(parameter, grad)
        return home

    def abandon(self) -> None:
        """After an error: nothing is fetched any more, what is still managed is out of reach."""
        self.store.abandon()
        for home in self.homes.values():
            home.manager = None
            if home.parameter is not None:
                mark_ordinary(home.parameter)
        self.homes.clear()

    def _give_back_grad(self, parameter: nn.Parameter, grad: Tensor) -> None:
        grad_home = home_of(grad)
        assert grad_home is not None
        self.store.free_from_store(grad_home.chunk, grad_home.index)
        grad_home.manager = None
        mark_ordinary(grad)
        write_autograd_grad(parameter, grad)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
