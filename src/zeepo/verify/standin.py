"""What `zeepo` is for a program that runs plainly under `zeepo verify`: everything does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import Tensor, nn

import zeepo
import zeepo.engine.api
from zeepo.engine.stats import Stats
from zeepo.planner.plan import Plan


class PlainSession:
    """Has the public methods of a session; leaves the model and the optimizer alone."""

    def __init__(self) -> None:
        self.is_closed = False
        self.plan = Plan(
            (), 0, dict.fromkeys(("params", "grads", "optimizer_state"), "ram"), 0, 0, 0
        )

    def stats(self) -> Stats:
        return Stats({}, {}, {}, {}, {}, 0, 0, 0, 0, 0, 0.0)

    @contextlib.contextmanager
    def gathered(self, target: Any) -> Iterator[list[Tensor]]:
        if isinstance(target, nn.Module):
            yield list(target.parameters())
        else:
            yield [target] if isinstance(target, Tensor) else list(target)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    resize = register = save = load = export = _nothing

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> PlainSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def make_zeepo_do_nothing() -> None:
    """Replace the functions of `zeepo` in this process."""
    opened: list[PlainSession] = []

    def init(*args: Any, **kwargs: Any) -> PlainSession:
        opened.append(PlainSession())
        return opened[-1]

    def current_session() -> PlainSession | None:
        return opened[-1] if opened and not opened[-1].is_closed else None

    def close() -> None:
        for session in opened:
            session.close()

    def nothing(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    replace_functions({"init": init, "current_session": current_session, "close": close})
    for name in ("lazy", "resize", "register", "save", "load", "export"):
        if hasattr(zeepo, name):
            replace_functions({name: nothing})


def replace_functions(functions: dict[str, Any]) -> None:
    """Put functions in the place of zeepo's own, wherever a program may import them from."""
    for name, function in functions.items():
        for module in (zeepo, zeepo.engine.api):
            if hasattr(module, name):
                setattr(module, name, function)
