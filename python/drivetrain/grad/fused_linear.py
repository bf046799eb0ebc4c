"""torch.nn.Linear after fuse_wgrad()."""

import torch
from torch import Tensor, nn

from .. import _C


def is_plain(input: Tensor) -> bool:
    """Returns whether the input is a plain tensor, neither traced nor a subclass."""
    return type(input) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


class Linear(nn.Linear):
    """torch.nn.Linear after fuse_wgrad()."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer as torch does."""
        if is_plain(input):
            return _C.fused_linear(input, self.weight, self.bias, is_conv1d=False)
        return super().forward(input)
