"""Copies of Python values in which the tensors are those of the original, or chosen others.

A forward may change what it is given: append to a list, fill a cache, draw from a generator. Who
wants to run it a second time with what it was given takes such a copy before. Containers are
copied, and objects that are nothing but attributes; constants, functions and modules are not.
"""

from __future__ import annotations

import copy
import enum
import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

Replace = Callable[[Tensor], Tensor]

_CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type(...), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(enum.Enum, nn.Module, functools.partial, numpy.dtype, numpy.generic),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
_PLAIN_CONSTANTS = frozenset({type(None), bool, int, float, str})
"""Most values; asked for first because it is faster."""
_RANDOM: tuple[type, ...] = (random.Random, numpy.random.Generator, numpy.random.RandomState)


class NotCopyableError(Exception):
    """A value that might be changed and cannot be copied; the message is its type."""


class StructureCopy:
    """One copying: values that are met twice are one value in the copy as well."""

    def __init__(self, replace: Replace, *, objects: bool):
        self._replace = replace
        self._objects = objects
        """Whether objects with attributes are copied too, and what cannot be copied is refused."""
        self._copies: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if type(value) in _PLAIN_CONSTANTS or isinstance(value, _CONSTANTS):
            return value
        known = self._copies.get(id(value), self)
        if known is self:
            known = self._copies[id(value)] = self._copy(value)
        return known

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._replace(value)
        if isinstance(value, tuple):
            return tuple.__new__(kind, [self.of(item) for item in value])
        if kind in (list, deque):
            copied = self._copies[id(value)] = copy.copy(value)
            copied.clear()
            copied.extend(self.of(item) for item in value)
            return copied
        if kind in (dict, OrderedDict, defaultdict):
            copied = self._copies[id(value)] = copy.copy(value)
            copied.update({key: self.of(item) for key, item in value.items()})
            return copied
        if kind in (set, frozenset):
            return kind(self.of(item) for item in value)
        if kind is torch.Generator:
            return value.clone_state()
        if isinstance(value, _RANDOM):
            return copy.deepcopy(value)
        if not self._objects:
            return value
        if not _is_only_attributes(value):
            raise NotCopyableError(f"{kind.__module__}.{kind.__qualname__}")
        copied = self._copies[id(value)] = object.__new__(kind)
        copied.__dict__.update({name: self.of(item) for name, item in value.__dict__.items()})
        return copied


def _is_only_attributes(value: Any) -> bool:
    kind: Any = type(value)
    has_slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    return kind.__new__ is object.__new__ and hasattr(value, "__dict__") and not has_slots
