"""zeepo trains PyTorch models that are bigger than the memory they are given."""

from zeepo.engine import telemetry as _telemetry
from zeepo.engine.api import close, current_session, init
from zeepo.engine.lazy import lazy
from zeepo.engine.session import Session
from zeepo.errors import (
    BudgetError,
    ConfigError,
    CorruptionError,
    DiskError,
    InternalError,
    SessionError,
    UnsupportedError,
    ZeepoError,
)
from zeepo.report import observe as _observe_progress

_telemetry.observers.append(_observe_progress)

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "DiskError",
    "InternalError",
    "Session",
    "SessionError",
    "UnsupportedError",
    "ZeepoError",
    "__version__",
    "close",
    "current_session",
    "init",
    "lazy",
]
