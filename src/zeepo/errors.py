"""Every error zeepo raises, in one file.

Each error is also the builtin a caller would expect (a bad option is a `ValueError`, a budget that
does not hold is a `MemoryError`), so code that knows nothing of zeepo still handles it properly.
A message says what failed, how much with units, where (parameter, tier, rank) and what to try.
"""


class ZeepoError(Exception):
    """Base of every error that zeepo raises on purpose."""


class ConfigError(ZeepoError, ValueError):
    """An option is unknown, malformed, or contradicts another option or the machine."""


class BudgetError(ZeepoError, MemoryError):
    """A tier's budget cannot hold what was asked of it; raised before anything is allocated."""


class DiskError(ZeepoError, OSError):
    """A disk tier's directory, file or transfer failed."""


class CorruptionError(DiskError):
    """Bytes that came back from disk are not the bytes that were written."""


class RankError(ZeepoError, ConnectionError):
    """Another rank died, does not answer, or does something else than this one."""


class SessionError(ZeepoError, RuntimeError):
    """A session was used outside its life: a second `init`, or use of a closed session."""


class UnsupportedError(ZeepoError, NotImplementedError):
    """A valid request that this version of zeepo, or this model, cannot serve."""


class WeightsError(ZeepoError, RuntimeError):
    """A weight file and a model do not fit each other: names or shapes differ."""


class InternalError(ZeepoError, AssertionError):
    """An invariant of zeepo itself is broken: a bug in zeepo, never the user's mistake."""
