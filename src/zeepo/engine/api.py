"""`zeepo.init` and the functions that act on the open session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeepo.config import resolve_options
from zeepo.engine.adoption import models_and_optimizers, warn_of_strangers
from zeepo.engine.late import LateSession, live_optimizers
from zeepo.engine.session import Session
from zeepo.errors import ConfigError, SessionError
from zeepo.launch import launching

_session: Session | None = None


def init(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    config: str | Path | None = None,
    **options: Any,
) -> Session:
    """Put a model and its optimizer (one or several of each) under management.

    Without a model, what trains is adopted at its first forward. Options, as keywords, `ZEEPO_*`
    variables or in the TOML file `config`:

    - ram: how much the process may grow, "2GiB" or bytes; default: that of `zeepo.lazy(ram=...)`,
      if the model was built in one, else what is free, less a margin.
    - disk: a directory, or a list of them, for what does not stay in RAM; default: none.
    - disk_limit: how much of it may be used; default: what is free there.
    - params, grads, optimizer_state: "ram" or "disk", where each rests; default "auto": the disk
      if there is one.
    - activations: what autograd saves: "ram", "disk", "recompute"; default "auto": in RAM, and on
      disk when memory is short.
    - stage: with several ranks, what is split over them: 0 nothing, 1 optimizer state, 2 gradients
      too, 3 parameters too; default "auto": 3, or 0 for optimizers that need whole parameters.
    - weigh_samples: whether ranks whose batches differ in size contribute by their number of
      samples; default True. False: all alike, as torch's DDP.
    - progress: whether progress is shown on stderr; default "auto": when it is a terminal.
    - events: a file to which every event is appended, one JSON object per line; default: none.

    - num_gpus: how many ranks; those that no launcher has started are started here, from the same
      program. Every rank then takes its slice of every batch of a DataLoader.

    Known, and refused by name until their time comes: device_memory, precision, update, durable
    and resume. zero_offload is accepted: it is what zeepo does.
    """
    global _session
    resolved = resolve_options(options, config_path=config)
    if _session is not None and not _session.is_closed:
        raise SessionError("zeepo.init: a session is open already. Close it first: zeepo.close().")
    launching.launch(resolved.num_gpus)
    models, optimizers = models_and_optimizers(model, optimizer)
    if not models and optimizers:
        raise ConfigError("zeepo.init got an optimizer without a model: give both, or neither.")
    if not models:
        _session = LateSession(resolved)
    else:
        warn_of_strangers(models, optimizers)
        _session = Session(models, optimizers or live_optimizers(models), resolved)
    return _session


def current_session() -> Session | None:
    """The open session, or None."""
    return _session if _session is not None and not _session.is_closed else None


def close() -> None:
    """Close the open session; harmless when there is none."""
    session = current_session()
    if session is not None:
        session.close()


def resize(*, ram: int | str) -> None:
    """Give the open session another budget: `session.resize`."""
    session = current_session()
    if session is None:
        raise SessionError("zeepo.resize: no session is open. Open one by zeepo.init.")
    session.resize(ram=ram)


def export(path: str | Path, *, max_shard_bytes: int | str = "5GB") -> None:
    """Write the open session's model as safetensors: `session.export`."""
    session = current_session()
    if session is None:
        raise SessionError("zeepo.export: no session is open. Open one by zeepo.init.")
    session.export(path, max_shard_bytes=max_shard_bytes)
