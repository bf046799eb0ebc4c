"""Remembers the names under which modules have their parameters, for the messages of errors only."""

from collections.abc import MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # keeps no parameter alive


def remember(module: nn.Module) -> None:
    """Remembers the names that the module has for its parameters."""
    for name, param in module.named_parameters():
        _names[param] = name


def name_of(param: Tensor) -> str | None:
    """Returns the name under which `remember` last saw the parameter; None: no module with it was remembered."""
    return _names.get(param)
