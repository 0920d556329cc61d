"""Optimizers: zeepo's own, and running any of them on slots."""

from zeepo.optim.adagrad import Adagrad
from zeepo.optim.adam import Adam, AdamW
from zeepo.optim.lion import Lion
from zeepo.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]
