"""What autograd saves for backward: kept in RAM, or sent to disk and brought back in time.

A pair of torch's saved-tensor hooks sees everything a node saves, from `init` to `close`; nothing
of the model is touched. Inside activation checkpointing the innermost pair wins, so what is going
to be recomputed is never sent anywhere.

[Note: saved tensors]
What is saved is kept by storage: one `Saved` for all tensors over it, with an alias that keeps the
memory. Sending one down means writing its bytes, whole, to the disk tier and letting the alias go;
the memory is free when forward has let go of it too. Backward asks for the most recent first, so
the oldest go first, and while one is read back those saved just before it are read ahead. Values
are the same bytes whichever way they went.

In mode "disk" everything goes as soon as a small window is full; in mode "auto" only when the
budget asks for it (`spill`), the oldest first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from zeepo.chunks.storages import address, memory_of, num_users
from zeepo.engine.managed import Home, home_of, mark_managed
from zeepo.engine.manager import Manager
from zeepo.engine.saved import Ended, Handle, Saved, Weight, check_version, num_own_users
from zeepo.engine.tuning import Tuning
from zeepo.errors import CorruptionError, DiskError
from zeepo.memory.tier import Tier
from zeepo.planner.footprint import LOOK_BYTES
from zeepo.sabotage import sabotaged

SPILL_BYTES = 16 << 20
"""The least that is sent down at once when the budget asks."""


class Activations:
    """The saved tensors of a session."""

    def __init__(
        self,
        manager: Manager,
        tier: Tier,
        tuning: Tuning,
        *,
        is_eager: bool,
    ):
        self._manager = manager
        self._store = manager.store
        self._tier = tier
        self._smallest_bytes = tuning.smallest_activation_bytes
        self._window_bytes = tuning.activation_window_bytes
        self._is_eager = is_eager
        """Mode "disk"; otherwise "auto"."""
        self._by_address: dict[int, weakref.ref[Saved]] = {}
        """Storage -> what is kept of it, while it is in RAM."""
        self._in_ram: dict[int, weakref.ref[Saved]] = {}
        """By number: the oldest, which backward needs last, come first."""
        self._on_disk: dict[int, weakref.ref[Saved]] = {}
        self._being_written: deque[tuple[Future[None], Tensor, weakref.ref[Saved]]] = deque()
        self._in_ram_bytes = 0
        self._next_number = 0
        self._unseen_bytes = 0
        self._ended: deque[Ended] = deque()
        self._is_installed = False
        self._is_over = False
        """The tier is closed, and its extents with it."""
        self._undo_disable: Any = None
        self.num_spilled = 0
        self.num_fetched = 0

    # -- torch's hooks ----------------------------------------------------------------------------

    def install(self) -> None:
        """See everything that is saved from now on, in this thread.

        Inside a block of somebody else's hooks we stay out: leaving it would take ours away, not
        his. Activations then stay in RAM.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        self._is_installed = True
        original = torch.autograd.graph.disable_saved_tensors_hooks
        activations = self

        @contextlib.contextmanager
        def disable(*args: Any, **kwargs: Any) -> Iterator[None]:
            """Torch refuses to disable hooks that are there: ours make way (torch.func)."""
            with activations.paused(), original(*args, **kwargs):
                yield

        torch.autograd.graph.disable_saved_tensors_hooks = disable

        def undo() -> None:
            torch.autograd.graph.disable_saved_tensors_hooks = original

        self._undo_disable = undo

    def _is_on_top(self) -> bool:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self._pack

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Saved as without us, where the hooks cannot be (torch.func, torch.compile)."""
        is_paused = self._is_installed and self._is_on_top()
        if is_paused:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            if is_paused and self._is_installed:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def remove(self) -> None:
        """Save as torch does again. Graphs that are alive keep what they saved, in RAM."""
        if not self._is_installed:
            return
        self._is_installed = False
        self._undo_disable()
        others = []  # of blocks that were entered later and are not left yet
        autograd: Any = torch._C._autograd
        while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            if hooks[0] == self._pack:
                break
            others.append(hooks)
        for hooks in reversed(others):
            autograd._push_saved_tensors_default_hooks(*hooks)

    def bring_back(self) -> DiskError | None:
        """Before the tier is closed: what a living graph still needs comes back to RAM.

        What cannot be read concerns that graph alone: it is told, and the rest goes on.
        """
        failure: DiskError | None = None
        while self._being_written:
            try:
                self._finish_writes(leave_bytes=0)
            except DiskError:  # the bytes are still here
                continue
        for reference in list(self._on_disk.values()):
            saved = reference()
            if saved is not None:
                try:
                    saved.alias = self._fetch(saved)
                except DiskError as error:
                    failure = failure or error
        self._on_disk.clear()
        self._drain()
        self._is_over = True
        return failure

    # -- saving -----------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | Handle | Weight:
        kept = _detached(tensor)
        home = self._home_of_storage(kept)
        if home is not None:
            mark_managed(kept, home)
            return Weight(kept)
        if not self._is_installed or not self._can_move(kept):
            return kept
        with self._store.lock:
            self._drain()
            storage = kept.untyped_storage()
            known = self._by_address.get(address(storage))
            saved = known() if known is not None else None
            if saved is not None and saved.alias is not None and saved.has_bytes_of(kept):
                return Handle(saved, kept)
            saved = self._keep(kept, storage)
            handle = Handle(saved, kept)  # known to `saved` before anything is sent down
            self._make_way(saved.nbytes)
            return handle

    def _can_move(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        is_managed = address(storage) in self._manager.by_storage
        is_small = storage.nbytes() < self._smallest_bytes
        return not is_managed and not is_small and not storage.is_shared()

    def _home_of_storage(self, tensor: Tensor) -> Home | None:
        if tensor.layout is not torch.strided:
            return None
        return self._manager.parameter_home(tensor.untyped_storage())

    def _keep(self, tensor: Tensor, storage: torch.UntypedStorage) -> Saved:
        saved = Saved(self._next_number, tensor, storage.nbytes(), self._ended)
        self._next_number += 1
        self._by_address[address(storage)] = weakref.ref(saved)
        self._note_in_ram(saved)
        return saved

    def _make_way(self, nbytes: int) -> None:
        """So much more is kept: what the mode or the budget does not allow goes."""
        self._unseen_bytes += nbytes
        if self._is_eager:
            self._send_down(self._in_ram_bytes - self._window_bytes)
            self._finish_writes(leave_bytes=self._window_bytes)
        if self._unseen_bytes >= LOOK_BYTES:
            self._unseen_bytes = 0
            self._store.look_at_budget()

    def _note_in_ram(self, saved: Saved) -> None:
        self._in_ram[saved.number] = weakref.ref(saved)
        self._in_ram_bytes += saved.nbytes

    # -- moving down ------------------------------------------------------------------------------

    def spill(self, nbytes: int) -> int:
        """Free so many bytes, if there are as many; how many were freed."""
        with self._store.lock:
            self._drain()
            self._cancel_reads()
            started = self._send_down(max(nbytes, SPILL_BYTES), only_ours=True)
            self._finish_writes(leave_bytes=0)
            self._drain()
            return started

    def _send_down(self, nbytes: int, *, only_ours: bool = False) -> int:
        """Start to write the oldest, `nbytes` of them; what is on disk already just goes."""
        started = 0
        for number, reference in list(self._in_ram.items()):
            saved = reference()
            if started >= nbytes:
                break
            if saved is None or saved.alias is None:
                continue
            if (only_ours or saved.is_part) and _is_used_by_others(saved):
                # A slice of the user's data stays: all of it would be written and nothing freed.
                nbytes -= 0 if only_ours else saved.nbytes
                continue
            del self._in_ram[number]
            self._in_ram_bytes -= saved.nbytes
            started += saved.nbytes
            if saved.extent is not None:
                self._forget_memory(saved)
                continue
            saved.extent = self._tier.allocate(saved.label, saved.nbytes)
            saved.version_written = saved.alias._version
            memory = memory_of(saved.alias.untyped_storage())
            future = self._tier.write(saved.extent, [(0, memory)])
            self._being_written.append((future, saved.alias, reference))
            self.num_spilled += 1
            if sabotaged("activation.write"):
                saved.alias.view(torch.uint8).zero_()
        return started

    def _finish_writes(self, *, leave_bytes: int) -> None:
        """Let go of what is written; wait until no more than `leave_bytes` are on their way."""
        left = sum(alias.untyped_storage().nbytes() for _, alias, _ in self._being_written)
        while self._being_written:
            future, alias, reference = self._being_written[0]
            if left <= leave_bytes and not future.done():
                return
            saved = reference()
            try:
                self._store.wait(future)
            except DiskError as error:
                self._being_written.popleft()
                if saved is None:
                    continue  # nobody needs it any more
                saved.extent = None  # the bytes are still here
                self._note_in_ram(saved)
                raise DiskError(f"{saved.label} could not be sent to disk: {error}") from error
            self._being_written.popleft()
            left -= alias.untyped_storage().nbytes()
            if saved is not None:
                self._forget_memory(saved)
                if alias._version != saved.version_written:  # changed on its way: of no use
                    del self._on_disk[saved.number]

    def _forget_memory(self, saved: Saved) -> None:
        assert saved.alias is not None
        for reference in saved.handles:
            handle = reference()
            if handle is not None:
                handle.let_go()
        key = address(saved.alias.untyped_storage())
        known = self._by_address.get(key)
        if known is not None and known() is saved:
            del self._by_address[key]
        saved.alias = None
        self._on_disk[saved.number] = weakref.ref(saved)

    # -- moving up --------------------------------------------------------------------------------

    def _unpack(self, kept: Tensor | Handle | Weight) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, Weight):
            check_version(kept.tensor.shape, kept.version, kept.tensor._version)
            home = home_of(kept.tensor)
            if home is not None:  # autograd hands out another tensor, an ordinary one
                self._manager.lease_for_running_function(home)
            return kept.tensor
        with self._store.lock, torch.no_grad():
            self._drain()
            saved = kept.saved
            alias = saved.alias
            kept.check()
            if alias is None:
                alias = saved.alias = self._fetch(saved)
                self._note_in_ram(saved)
                self._read_ahead(saved.number)
            return kept.over(alias.untyped_storage())

    def _fetch(self, saved: Saved) -> Tensor:
        if self._is_over:
            raise CorruptionError(
                f"{saved.label} could not be read when the session was closed: this graph cannot "
                "go backward any more. Run its forward again."
            )
        self._start_read(saved)
        assert saved.reading is not None
        (future, memory), saved.reading = saved.reading, None
        if not sabotaged("activation.wait"):
            try:
                self._store.wait(future)
            finally:
                future.exception()  # the memory must not be used for anything else before
        self._on_disk.pop(saved.number, None)
        self.num_fetched += 1
        return memory

    def _start_read(self, saved: Saved) -> None:
        """Into memory of torch's, as if it had never been away; chunks make room for it."""
        if saved.reading is None:
            assert saved.extent is not None
            self._store.expect(saved.nbytes)
            memory = torch.empty(saved.nbytes, dtype=torch.uint8)
            future = self._tier.read(saved.extent, memory_of(memory.untyped_storage()))
            saved.reading = future, memory

    def _read_ahead(self, number: int) -> None:
        """Start to read what backward needs next, as far as there is room without moving others."""
        ahead_bytes = 0
        for other in sorted((n for n in self._on_disk if n < number), reverse=True):
            saved = self._on_disk[other]()
            if saved is None:
                continue
            ahead_bytes += saved.nbytes
            if ahead_bytes > self._window_bytes or not self._store.has_room_for(saved.nbytes):
                return
            self._start_read(saved)

    def clear_up(self) -> None:
        """Give back what backward has let go of."""
        with self._store.lock:
            self._drain()
            for key in [key for key, saved in self._by_address.items() if saved() is None]:
                del self._by_address[key]

    def _cancel_reads(self) -> None:
        """What was read ahead and not asked for stays on disk."""
        for reference in self._on_disk.values():
            saved = reference()
            if saved is not None and saved.reading is not None:
                (future, _), saved.reading = saved.reading, None
                future.exception()

    def _drain(self) -> None:
        """Clear up after what the garbage collector noted."""
        while self._ended:
            number, nbytes, extent, reading = self._ended.popleft()
            if self._in_ram.pop(number, None) is not None:
                self._in_ram_bytes -= nbytes
            self._on_disk.pop(number, None)
            if reading is not None:
                reading[0].exception()
            if extent is not None and not self._is_over:
                self._tier.free(extent)


def _is_used_by_others(saved: Saved) -> bool:
    """Whether sending it down would free nothing."""
    assert saved.alias is not None
    # One more: the storage object that asks.
    return num_users(saved.alias.untyped_storage()) > num_own_users(saved) + 1


def _detached(tensor: Tensor) -> Tensor:
    """Without its history: autograd would keep an output that keeps the node that keeps it."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return tensor.detach()
