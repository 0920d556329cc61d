"""Hyperparameters that make no sense are refused when an optimizer is made."""

from __future__ import annotations

from torch import Tensor

from zeepo.errors import ConfigError


def single(name: str, value: float | Tensor) -> float:
    """A number that may be kept in a tensor."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{name} is a tensor of {value.numel()} numbers: it must be one.")
        return float(value.item())
    return value


def at_least_zero(**values: float | Tensor) -> None:
    """Every value is zero or more."""
    for name, value in values.items():
        if not single(name, value) >= 0:
            raise ConfigError(f"{name}={value}: it must not be negative.")


def below_one(betas: tuple[float | Tensor, float | Tensor]) -> tuple[float, float]:
    """Averages' weights, as numbers from 0 to less than 1."""
    first, second = (single("beta", beta) for beta in betas)
    for beta in (first, second):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas={betas}: both must be at least 0 and less than 1.")
    return first, second
