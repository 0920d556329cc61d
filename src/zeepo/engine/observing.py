"""Who listens while something goes on: the observers that were made for it, from start to end.

Those above the engine fill `observers` (a progress display); each is asked whenever a model is
built or a session opened. Whoever observes is closed when it is over, and what goes wrong there is
told, not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zeepo import events
from zeepo.config import Options


class Observer(Protocol):
    """A listener that has something to close."""

    def __call__(self, event: events.Event) -> None: ...

    def close(self) -> None: ...


observers: list[Callable[[Options], Observer | None]] = []
"""Asked at every build and every init whether they want to observe."""


class Observation:
    """Observers from now until `stop`; `first` are those that are there already."""

    def __init__(self, options: Options, first: Sequence[Observer] = ()) -> None:
        self._observing: list[Observer] = []
        for observer in first:
            self._observe(observer)
        try:
            for make in observers:
                made = make(options)
                if made is not None:
                    self._observe(made)
        except BaseException:
            self.stop()
            raise

    def _observe(self, observer: Observer) -> None:
        self._observing.append(observer)
        events.listen(observer)

    def stop(self) -> None:
        """Nobody listens any more; twice is harmless."""
        while self._observing:
            observer = self._observing.pop()
            events.stop_listening(observer)
            try:
                observer.close()
            except Exception as error:  # as for its events: the training is worth more
                events.warn(f"{observer} cannot be closed: {error!r}.")
