"""Loads the native parts (native/): shared libraries, built beside the modules that use them."""

import ctypes
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from zeepo.errors import InternalError


def load(
    module_file: str,
    name: str,
    structure: type[ctypes.Structure],
    size_function: str,
    declare: Callable[[ctypes.CDLL], None],
) -> ctypes.CDLL | None:
    """The library of this name beside a module; None if it was not built.

    `size_function` of the library says how large it takes `structure` to be, and `declare` tells
    ctypes what its functions take: where either does not fit, it is of other sources than we are.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(module_file).with_name(f"{name}{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            if not _fits(library, structure, size_function, declare):
                raise InternalError(
                    f"{path} was built from other sources than this package: install zeepo again, "
                    "or in a clone run `make native`."
                )
            return library
    return None


def _fits(
    library: ctypes.CDLL,
    structure: type[ctypes.Structure],
    size_function: str,
    declare: Callable[[ctypes.CDLL], None],
) -> bool:
    try:
        size = getattr(library, size_function)
        declare(library)
    except AttributeError:  # a function is missing
        return False
    size.restype = ctypes.c_int64
    return bool(size() == ctypes.sizeof(structure))
