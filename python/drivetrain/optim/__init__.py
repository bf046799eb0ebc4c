"""Optimizers with torch's constructors and state, stepped in one parallel pass over all parameters.

Every class of `torch.optim` is here. SparseAdam and LBFGS are torch's own: one steps only sparse gradients, and the
other calls the model several times per step.
"""

from torch.optim import LBFGS, SparseAdam

from .adadelta import Adadelta
from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adamax import Adamax
from .adamw_schedule_free import AdamWScheduleFree
from .adan import Adan
from .adopt import ADOPT
from .asgd import ASGD
from .clip_grad import clip_grad_norm_
from .lamb import LAMB
from .lion import Lion
from .muon import Muon
from .nadam import NAdam
from .radam import RAdam
from .rmsprop import RMSprop
from .rprop import Rprop
from .sgd import SGD
from .sharded.full_state import full_state_dict

__all__ = [
    "ADOPT",
    "ASGD",
    "LAMB",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adamax",
    "Adan",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
    "clip_grad_norm_",
    "full_state_dict",
]
