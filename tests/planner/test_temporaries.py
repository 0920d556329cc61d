"""What is reckoned for an optimizer's temporaries is what its update really makes, or more."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeepo.optim.catalogue import num_temporaries_of

NUMEL = 4096
CLASSES = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "decay": {"weight_decay": 0.1},
    "both": {"maximize": True, "weight_decay": 0.1},
}


class _Count(TorchDispatchMode):
    """The most bytes that functions made and that were alive at once."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.held_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return result

    def _hold(self, storage: Any) -> None:
        before = self._alive.get(storage._cdata)
        if storage._cdata in self._known or (before is not None and before() is storage):
            return
        nbytes = storage.nbytes()

        def gone(_: Any) -> None:
            self.held_bytes -= nbytes

        self._alive[storage._cdata] = weakref.ref(storage, gone)
        self.held_bytes += nbytes


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_an_update_makes_no_more_than_is_reckoned(name: str, settings: str) -> None:
    given = dict(SETTINGS[settings])
    if name == "Rprop":
        given.pop("weight_decay", None)
    p = torch.nn.Parameter(torch.randn(NUMEL))
    optimizer = getattr(torch.optim, name)([p], lr=1e-3, **given)
    for _ in range(2):  # a first step makes states, which are reckoned apart
        p.grad = torch.randn(NUMEL)
        optimizer.step()
    states = [value for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    with _Count([p, p.grad, *states]) as count:
        optimizer.step()
    assert round(count.peak_bytes / (4 * NUMEL)) <= num_temporaries_of(optimizer)


def test_a_fused_update_makes_none() -> None:
    p = torch.nn.Parameter(torch.randn(NUMEL))
    assert num_temporaries_of(torch.optim.AdamW([p], fused=True)) == 0
    assert num_temporaries_of(torch.optim.AdamW([p])) == 2
    assert num_temporaries_of(torch.optim.Adam([p], weight_decay=0.1)) == 3
