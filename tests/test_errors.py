"""Errors are also the builtins a caller expects, and show their message whole."""

import inspect
import pickle

import pytest

from zeepo import errors

EXPECTED = {
    "ZeepoError": Exception,
    "ConfigError": ValueError,
    "RankError": ConnectionError,
    "BudgetError": MemoryError,
    "DiskError": OSError,
    "CorruptionError": OSError,
    "SessionError": RuntimeError,
    "UnsupportedError": NotImplementedError,
    "WeightsError": RuntimeError,
    "InternalError": AssertionError,
}


def test_the_list_of_errors_is_the_one_pinned_here() -> None:
    defined = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    assert defined == set(EXPECTED)


@pytest.mark.parametrize(("name", "builtin"), EXPECTED.items())
def test_each_is_a_builtin_and_a_zeepo_error(name: str, builtin: type[Exception]) -> None:
    error_type = getattr(errors, name)
    assert issubclass(error_type, errors.ZeepoError)
    assert issubclass(error_type, builtin)
    assert error_type.__doc__
    assert len(error_type.__doc__.splitlines()) == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_message_survives_and_pickles(name: str) -> None:
    error = getattr(errors, name)("cannot place 64.0 MiB in ram")
    assert str(error) == "cannot place 64.0 MiB in ram"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_corruption_is_a_disk_error() -> None:
    assert issubclass(errors.CorruptionError, errors.DiskError)
