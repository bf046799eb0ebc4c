"""What users call parameters: remembered by those who know, read for the messages of errors only."""

from collections.abc import MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # keeps no parameter alive


def remember(module: nn.Module) -> None:
    """Notes the names that the module has for its parameters."""
    for name, param in module.named_parameters():
        _names[param] = name


def name_of(param: Tensor) -> str | None:
    """The name under which a module was last seen to have the parameter; None: no module has shown it."""
    return _names.get(param)
