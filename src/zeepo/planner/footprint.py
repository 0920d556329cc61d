"""What a forward and backward will need in RAM, found out without doing any arithmetic.

The model runs on tensors that have shapes and no memory (torch's FakeTensorMode), parameters
included, and every storage that comes and goes is counted. At each function the sum is taken of
what torch holds at that moment and of the chunks the function leases; the largest sum is the
working set that no placement can avoid. What autograd saves is counted apart, because it can go
to disk: then only what one function needs of it is there at a time.

The caller sees to it that running the user's code once more has no effects (engine/estimate.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from zeepo.planner.plan import Footprint

LOOK_BYTES = 4 << 20
"""When so much is saved, the engine looks at its budget."""


@dataclass
class _Count:
    """What is held now, and the worst so far."""

    chunk_bytes: Mapping[int, int]
    """Chunk -> bytes that a lease of it brings in."""
    chunk_names: Mapping[int, str]
    seen_of_arguments: dict[int, int] = field(default_factory=dict)
    """Storage of an argument -> bytes of it that are seen: it may be a slice of all the data."""
    held_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    seen_bytes: int = 0
    """What was held when the engine last looked at the budget."""
    rise_bytes: int = 0
    most_bytes: int = 0
    worst: Footprint = field(default_factory=lambda: Footprint(0, 0, 0, 0, 0, "nothing"))

    def see_argument(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        nbytes = tensor.numel() * tensor.element_size()
        self.seen_of_arguments[key] = self.seen_of_arguments.get(key, 0) + nbytes

    def bytes_of(self, storage: torch.UntypedStorage) -> int:
        """What counts of a storage."""
        nbytes = storage.nbytes()
        return min(nbytes, self.seen_of_arguments.get(storage._cdata, nbytes))

    def look(self) -> None:
        self.seen_bytes = self.held_bytes

    def note(self, what: str, chunks: set[int], extra_bytes: int = 0) -> None:
        self.rise_bytes = max(self.rise_bytes, self.held_bytes - self.seen_bytes + extra_bytes)
        self.most_bytes = max(self.most_bytes, self.held_bytes + extra_bytes)
        leased = sum(self.chunk_bytes[c] for c in chunks) + extra_bytes
        if leased + self.held_bytes > self.worst.peak_bytes:
            names = ", ".join(sorted(self.chunk_names[c] for c in chunks)[:2])
            moment = f"{what} with {names}" if names else what
            self.worst = Footprint(leased + self.held_bytes, leased, self.held_bytes, 0, 0, moment)


def _workspace_bytes(name: str, args: Any, result: Any) -> int:
    """What a function takes inside: convolutions copy inputs and outputs into another layout."""
    if not name.startswith("aten::convolution"):
        return 0
    images = [t for t in (*_tensors(args), *_tensors(result)) if t.ndim >= 4]
    return sum(t.numel() * t.element_size() for t in images)


class _Watch(TorchDispatchMode):
    """Counts the storages that functions make, until they are gone."""

    def __init__(self, count: _Count, chunk_of: Mapping[int, int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._chunk_of = chunk_of
        """Storage of a parameter -> its chunk."""
        self._alive: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if key in self._chunk_of or (known is not None and known() is storage):
            return
        nbytes = self._count.bytes_of(storage)

        def gone(_: Any) -> None:
            self._count.held_bytes -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self._count.held_bytes += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chunks: set[int] = set()
        for tensor in _tensors((args, kwargs)):
            chunk = self._chunk_of.get(tensor.untyped_storage()._cdata)
            if chunk is not None:
                chunks.add(chunk)
        if chunks:
            self._count.look()
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.hold(tensor)
        workspace = _workspace_bytes(func.name(), args, result)
        if torch.is_grad_enabled():  # in backward: a node that is waiting while it recomputes
            chunks |= self._chunks_of_node(torch._C._current_autograd_node())
        self._count.note(func.name(), chunks, workspace)
        return result

    def _chunks_of_node(self, node: Any) -> set[int]:
        """The chunks of the parameters behind a backward node, or behind a view of them."""
        if node is None:
            return set()
        found: set[int] = set()
        for parent, _ in node.next_functions:
            for close in (parent, *(p for p, _ in getattr(parent, "next_functions", ()))):
                variable = getattr(close, "variable", None)
                if variable is not None:
                    chunk = self._chunk_of.get(variable.untyped_storage()._cdata)
                    found |= set() if chunk is None else {chunk}
        return found


def simulate(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chunk_of: Mapping[int, int],
    chunk_bytes: Mapping[int, int],
    chunk_names: Mapping[int, str],
    *,
    spills: bool,
    smallest_bytes: int = 0,
) -> Footprint:
    """Run `model` forward and backward on shapes. Its parameters are replaced for good.

    `chunk_of` maps id(parameter) to a chunk; `spills` says whether saved tensors leave RAM, those
    that have `smallest_bytes` or more.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    count = _Count(chunk_bytes, chunk_names)
    with mode:
        fakes = _replace_tensors(model, mode)
        storages = {
            fakes[number].untyped_storage()._cdata: chunk
            for number, chunk in chunk_of.items()
            if number in fakes
        }
        fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (list(args), dict(kwargs)))
        watch = _Watch(count, storages)
        arguments = list(_tensors((fake_args, fake_kwargs)))
        for tensor in arguments:
            count.see_argument(tensor)
        for tensor in arguments:
            watch.hold(tensor)
        for number, chunk in chunk_of.items():
            if number in fakes and fakes[number].requires_grad:
                _watch_gradient(fakes[number], chunk, count)
        hooks = _hooks(count, storages, smallest_bytes if spills else None)
        with watch, torch.autograd.graph.saved_tensors_hooks(*hooks):
            loss = _loss_of(model(*fake_args, **fake_kwargs))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
    worst = count.worst
    return Footprint(
        worst.peak_bytes,
        worst.leased_bytes,
        worst.torch_bytes,
        count.saved_bytes,
        count.rise_bytes,
        worst.moment,
        count.kept_bytes,
        count.most_bytes,
    )


def _replace_tensors(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Parameters and buffers become fakes, tied ones the same; returns id -> fake."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    shape, stride = tuple(tensor.shape), tensor.stride()
                    fake = torch.empty_strided(shape, stride, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    fakes[id(tensor)] = fake
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    return fakes


def _watch_gradient(parameter: Tensor, chunk: int, count: _Count) -> None:
    """A finished gradient is taken over: for a moment its chunk and what torch made are there."""

    def take_over(p: Tensor) -> None:
        count.note("the gradient", set(), extra_bytes=count.chunk_bytes[chunk])
        p.grad = None

    parameter.register_post_accumulate_grad_hook(take_over)  # type: ignore[no-untyped-call]


def _hooks(count: _Count, managed: Mapping[int, int], spills_from: int | None) -> tuple[Any, Any]:
    """Saved-tensor hooks that count, and forget what would be on disk."""
    seen: dict[int, weakref.ref[Any]] = {}

    def pack(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in managed:
            return tensor
        is_slice_of_data = count.bytes_of(storage) < storage.nbytes()
        is_large = spills_from is not None and storage.nbytes() >= spills_from
        is_spilled = is_large and not is_slice_of_data
        known = seen.get(storage._cdata)
        if known is None or known() is not storage:
            seen[storage._cdata] = weakref.ref(storage)
            count.saved_bytes += count.bytes_of(storage)
            count.kept_bytes += 0 if is_large else count.bytes_of(storage)
            if storage.nbytes() >= LOOK_BYTES:
                count.look()
        return _Shape(tensor) if is_spilled else tensor

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _Shape):
            return torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype)
        return kept  # type: ignore[no-any-return]

    return pack, unpack


class _Shape:
    """A saved tensor without its memory."""

    def __init__(self, tensor: Tensor):
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype


def _loss_of(output: Any) -> Tensor | None:
    """What backward would start from: the model's own loss, or one like cross entropy."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    total: Tensor | None = None
    for tensor in _tensors(output):
        if not tensor.requires_grad or not tensor.is_floating_point():
            continue
        term = tensor.sum() if tensor.numel() <= 1 else _cross_entropy(tensor)
        total = term if total is None else total + term
    return total


def _cross_entropy(logits: Tensor) -> Tensor:
    """Of all losses in use, the one that holds most beside its input."""
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.long))


def _tensors(value: Any) -> Iterator[Tensor]:
    leaves, _ = tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and hasattr(leaf, "to_tuple"):  # a Hugging Face output
            yield from _tensors(leaf.to_tuple())
