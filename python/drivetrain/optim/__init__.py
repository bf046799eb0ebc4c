"""Optimizers with torch's constructors and state, stepped in one parallel pass over all parameters."""

from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .deferral import clip_grad_norm_
from .lamb import LAMB
from .lion import Lion
from .muon import Muon
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = ["LAMB", "SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "RMSprop", "clip_grad_norm_"]
