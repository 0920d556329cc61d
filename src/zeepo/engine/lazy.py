"""Building a model inside a budget: `with zeepo.lazy(): model = GPT(...)`.

Inside the block every parameter is managed from the moment a module registers it, in a store of
its own: initialising it leases it, and what does not fit goes to disk. The initial values are the
eager constructor's, because the same functions run on the same tensors in the same order; only
where the bytes are in between differs. `zeepo.init` takes the parameters over one by one, with
the values they have.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zeepo.chunks.store import ChunkStore, Kind
from zeepo.config import Options, resolve_options
from zeepo.engine.building import Building
from zeepo.engine.managed import (
    Home,
    home_of,
    mark_managed,
    mark_ordinary,
    ordinary_copy,
    plain_torch,
    read_autograd_grad,
    write_autograd_grad,
)
from zeepo.engine.manager import Manager
from zeepo.engine.tuning import tuning
from zeepo.errors import SessionError
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.heap import give_back_free_memory
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.planner.plan import TORCH_GROWTH_BYTES
from zeepo.units import MiB

DEFAULT_RAM_BYTES = 64 * MiB
"""Without a stated budget: enough to keep writing while values are made."""
MANAGED_SHARE = 0.5
"""Of a stated budget; the rest is for values that are being made, and for the heap."""
HEAP_BYTES = 32 * MiB
"""What values that are being made may take beside what is managed, and as often the heap is given
back what they left."""


class LazyManager(Manager):
    """Parameters between their making and `init`: one chunk each."""

    is_building = True

    def __init__(self, options: Options, building: Building):
        self._building = building
        self.ram_bytes = options.ram
        """As stated, or None."""
        ram_bytes = options.ram or DEFAULT_RAM_BYTES
        beside_torch = ram_bytes - TORCH_GROWTH_BYTES - HEAP_BYTES
        share_bytes = min(int(MANAGED_SHARE * ram_bytes), beside_torch)
        managed_bytes = max(share_bytes, min(ram_bytes, DEFAULT_RAM_BYTES))
        self._made_bytes = 0
        """Since free heap memory was last given back."""
        ledger = Ledger("ram", managed_bytes)
        self._pool = BufferPool(ledger)
        self._disk = DiskTier(options.disk, options.disk_limit, pool=self._pool)
        store = ChunkStore(self._pool, prefetch=False)
        super().__init__(store, {Kind.PARAM: self._disk, Kind.GRAD: None, Kind.STATE: None})

    def register(self, name: str, parameter: nn.Parameter) -> None:
        """Take a parameter in, if it can be managed and is not yet."""
        home = home_of(parameter)
        if home is not None and home.manager is self:
            self._follow(home, parameter)
        elif home is None and _is_manageable(parameter):
            self._take_in(name, parameter)
            nbytes = parameter.numel() * parameter.element_size()
            self._building.add(nbytes)
            self._give_back_heap_after(nbytes)

    def _give_back_heap_after(self, nbytes: int) -> None:
        """What has left for the disk lay in the heap, which keeps it."""
        self._made_bytes += nbytes
        if self._made_bytes >= HEAP_BYTES and self.store.counters.num_evictions:
            self._made_bytes = 0
            give_back_free_memory()

    def _take_in(self, name: str, parameter: nn.Parameter) -> None:
        self._make_place(parameter)
        self.adopt_chunk(name, [(name, parameter)])

    def _follow(self, home: Home, parameter: nn.Parameter) -> None:
        """A parameter over the memory of another (a parametrization's) takes its place."""
        if home.parameter is not parameter:
            del self.homes[id(home.parameter)]
            self.homes[id(parameter)] = home
            home.parameter = parameter

    def replace_data(self, home: Home, tensor: Tensor, value: Tensor) -> None:
        """Of another dtype or size (`model.to(torch.bfloat16)`) it is taken in anew."""
        is_same = value.dtype == home.plain.dtype and value.numel() == home.plain.numel()
        if is_same or not isinstance(tensor, nn.Parameter) or home.parameter is not tensor:
            super().replace_data(home, tensor, value)
            return
        value = ordinary_copy(value) if home_of(value) is not None else value.detach()
        self.hand_over(tensor).manager = None  # views of the old values are ordinary now
        mark_ordinary(tensor)
        with plain_torch():
            tensor.data = value
        if _is_manageable(tensor):
            self._take_in(home.name, tensor)

    def copied(self, original: Home, copy: Tensor) -> None:
        """A deep copy, as `nn.TransformerEncoder` makes of its layer, is one more parameter."""
        if isinstance(copy, nn.Parameter):
            self.register(original.name, copy)

    # Gradients stay with autograd until a session is there for them.

    def _take_gradient(self, home: Home) -> None:
        pass

    def _watch_gradient(self, home: Home) -> None:
        pass

    def read_grad(self, home: Home) -> Tensor | None:
        assert home.parameter is not None
        return read_autograd_grad(home.parameter)

    def write_grad(self, home: Home, value: Tensor | None) -> None:
        assert home.parameter is not None
        write_autograd_grad(home.parameter, value)

    def _make_place(self, parameter: nn.Parameter) -> None:
        """The largest parameter needs itself and a copy: inside a budget, if one was stated."""
        least = 2 * parameter.numel() * parameter.element_size() + self._disk.staging_bytes
        ledger = self.store.ledger
        if (ledger.limit_bytes or 0) < least:
            ledger.limit_bytes = least if self.ram_bytes is None else min(least, self.ram_bytes)

    @property
    def held_bytes(self) -> int:
        """What it takes in RAM now."""
        return self.store.ledger.used_bytes

    # -- handing over to a session ----------------------------------------------------------------

    def evict_all(self) -> None:
        """Leave the RAM to the session that takes over."""
        for chunk in self.store.chunks():
            if chunk.is_resident and not chunk.leases:
                self.store.evict(chunk)
        self._pool.trim()
        give_back_free_memory()

    def hand_over(self, parameter: nn.Parameter) -> Home:
        """The parameter's home, with its bytes in memory of its own, for another manager."""
        home = super().hand_over(parameter)
        self._pool.trim()
        return home

    def close_if_empty(self) -> None:
        """Forget parameters that only we know (replaced by tied ones), and close after the last."""
        for key, home in list(self.homes.items()):
            if sys.getrefcount(home.parameter) <= 2:  # the home's reference and getrefcount's
                self.store.drop(home.chunk, home.index)
                del self.homes[key]
        if not self.homes:
            self._disk.close()


class lazy:
    """Build a model inside a budget: parameters are managed as soon as they are registered.

    `ram` is how much the process may grow while the model is built ("512MiB" or bytes); by default
    what is needed, twice the largest parameter. `disk` is a directory, or several, for the rest; by
    default `ZEEPO_DISK` or a temporary directory. `progress` is as for `zeepo.init`. Give the model
    to `zeepo.init` afterwards: without a `ram` of its own the session gets this one.
    """

    def __init__(
        self,
        ram: int | str | None = None,
        disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        progress: bool | str | None = None,
    ):
        given = {"ram": ram, "disk": disk, "progress": progress}
        environ = {"ZEEPO_DISK": str(_default_disk()), **os.environ}
        stated = {name: value for name, value in given.items() if value is not None}
        self._options = resolve_options(stated, environ=environ, caller="zeepo.lazy")
        self._originals: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        if nn.Module.register_parameter.__module__ == __name__:
            raise SessionError("zeepo.lazy: one block is open already; leave it first.")
        self._building = Building(self._options)
        try:
            manager = LazyManager(self._options, self._building)
        except BaseException:
            self._building.end(is_whole=False)
            raise
        self._originals = nn.Module.register_parameter, nn.Parameter.__new__
        register, new = self._originals

        def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self, name, param)
            if param is not None:
                manager.register(f"{type(self).__name__}.{name}", param)

        def new_parameter(cls: Any, data: Tensor | None = None, requires_grad: bool = True) -> Any:
            home = home_of(data)
            if home is None or data is None:
                return new(cls, data, requires_grad)
            with plain_torch():  # over managed memory: an ordinary parameter, which is managed too
                parameter = new(cls, data.detach(), requires_grad)
            mark_managed(parameter, home)
            return parameter

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Parameter.__new__ = new_parameter  # type: ignore[method-assign]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nn.Module.register_parameter, nn.Parameter.__new__ = self._originals  # type: ignore[method-assign]
        give_back_free_memory()
        self._building.end(is_whole=error is None)


def lazy_managers(parameters: Sequence[Tensor]) -> list[LazyManager]:
    """Those that hold some of these parameters."""
    managers = {id(h.manager): h.manager for h in map(home_of, parameters) if h is not None}
    return [manager for manager in managers.values() if isinstance(manager, LazyManager)]


def with_ram_of_lazy(options: Options, models: Sequence[nn.Module]) -> Options:
    """A session whose ram is not stated gets what its model was built in, the largest of several.

    Not where tools ask for the least.
    """
    if options.ram is not None or tuning().least_ram:
        return options
    managers = lazy_managers([p for model in models for p in model.parameters()])
    stated = [manager.ram_bytes for manager in managers if manager.ram_bytes is not None]
    return replace(options, ram=max(stated)) if stated else options


def _is_manageable(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.device.type == "cpu"


def _default_disk() -> Path:
    """A directory for temporary files that is meant to be on a disk."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())
