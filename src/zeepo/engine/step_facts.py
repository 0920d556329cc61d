"""What all ranks have to agree on before a step changes anything.

Each rank updates its own range of every parameter. If one of them had other hyperparameters, or had
scaled its gradients by another number, the parts would not belong together, and nobody would see
it. So each tells digests of what its step is made of, together with the fact that it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from zeepo.chunks.storages import memory_of
from zeepo.errors import RankError

DIGEST_BYTES = 8
ITEMS = (
    "which optimizer",
    "the hyperparameters (lr, ...)",
    "which parameters have a gradient",
    "how gradients were changed in place since the last step",
)


class StepFacts:
    """Digests of one rank's next step."""

    def __init__(self) -> None:
        self._changes = xxhash.xxh3_64()

    def note_change(self, function: str, name: str, arguments: Iterable[Any]) -> None:
        """A gradient was changed in place, by the same function for every element."""
        numbers = [_number(value) for value in arguments]
        self._changes.update(repr((function, name, numbers)).encode())

    def encode(
        self,
        optimizer: str,
        groups: Sequence[Mapping[str, Any]],
        with_gradient: Sequence[str],
    ) -> bytes:
        """What to tell the others; changes are counted anew from now on."""
        changes, self._changes = self._changes, xxhash.xxh3_64()
        known = [{k: _number(v) for k, v in g.items() if _is_simple(v)} for g in groups]
        digests = [
            xxhash.xxh3_64_digest(repr(v).encode()) for v in (optimizer, known, with_gradient)
        ]
        return b"".join([*digests, changes.digest()])


def digest_of_state(optimizer: Optimizer) -> bytes:
    """Of an optimizer's state as it is: each rank will keep a part of what must be one state."""
    hasher = xxhash.xxh3_128()
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                hasher.update(name.encode())
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    copy = value.detach().clone()  # its storage holds nothing else
                    hasher.update(memory_of(copy.untyped_storage()))
                elif isinstance(value, (int, float)):
                    hasher.update(repr(value).encode())
            hasher.update(b";")
    return hasher.digest()


def check_same(told: Sequence[bytes]) -> None:
    """RankError, with what differs, unless all ranks told the same."""
    for rank, fact in enumerate(told):
        if fact != told[0]:
            at = range(0, len(fact), DIGEST_BYTES)
            parts = [fact[i : i + DIGEST_BYTES] != told[0][i : i + DIGEST_BYTES] for i in at]
            items = [item for item, differs in zip(ITEMS, parts, strict=True) if differs]
            raise RankError(
                f"optimizer.step: rank {rank} differs from rank 0 in {' and '.join(items)}. Every "
                "rank has to do the same to the optimizer and to reduced gradients: use numbers "
                "that are the same on all (torch.distributed.all_reduce, or broadcast)."
            )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _is_simple(value: Any) -> bool:
    """Values whose text is the same in every process."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_simple, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float, str, type(None)))
