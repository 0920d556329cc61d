"""zeepo trains PyTorch models that are bigger than the memory they are given."""

from zeepo import optim
from zeepo.checkpoint.export import export_models
from zeepo.checkpoint.load import load_safetensors
from zeepo.engine import observing as _observing
from zeepo.engine.api import close, current_session, export, init, resize
from zeepo.engine.lazy import lazy
from zeepo.engine.session import Session
from zeepo.errors import (
    BudgetError,
    ConfigError,
    CorruptionError,
    DiskError,
    InternalError,
    RankError,
    SessionError,
    UnsupportedError,
    WeightsError,
    ZeepoError,
)
from zeepo.report import observe as _observe_progress

_observing.observers.append(_observe_progress)

Session.exporter = staticmethod(export_models)  # engine and checkpoint do not know each other

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "DiskError",
    "InternalError",
    "RankError",
    "Session",
    "SessionError",
    "UnsupportedError",
    "WeightsError",
    "ZeepoError",
    "__version__",
    "close",
    "current_session",
    "export",
    "init",
    "lazy",
    "load_safetensors",
    "optim",
    "resize",
]
