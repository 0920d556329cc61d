"""`torch.func`: its transforms wrap tensors in C++, where nothing intercepts.

While a session is open, a managed tensor that is given to `torch.func.grad`, `vmap` and the like is
leased until the next optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as vmap

from zeepo.engine.managed import home_of

_ENTRANCES = ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"))


def watch_transforms() -> Callable[[], None]:
    """Lease what enters a transform; returns the function that ends it."""
    originals = [(module, name, getattr(module, name)) for module, name in _ENTRANCES]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(tensor: Any, *args: Any) -> Any:
            home = home_of(tensor)
            if home is not None and home.manager is not None:
                home.manager.lease_until_step(home)
            return original(tensor, *args)

        return enter

    for module, name, original in originals:
        setattr(module, name, watched(original))

    def undo() -> None:
        for module, name, original in originals:
            setattr(module, name, original)

    return undo
