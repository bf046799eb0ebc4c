"""Optimizers with torch's constructors and state, stepped in one parallel pass over all parameters.

Every class of `torch.optim` is here. SparseAdam and LBFGS are torch's own: one steps only sparse gradients, and the
other calls the model several times per step.
"""

from torch.optim import LBFGS, SparseAdam

from .adafactor import Adafactor
from .clip_grad import clip_grad_norm_
from .element_wise import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from .muon import Muon
from .of_papers import ADOPT, LAMB, AdamWScheduleFree, Adan, Lion
from .state_dicts import full_state_dict

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
