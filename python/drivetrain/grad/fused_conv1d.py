"""Hugging Face's Conv1D after fuse_wgrad(). A module of its own because it imports transformers."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from .. import _C
from .fused_linear import is_plain


class Conv1D(TransformersConv1D):
    """A linear layer whose weight is [inputs, outputs], as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer as transformers does."""
        if is_plain(x):
            return _C.fused_linear(x, self.weight, self.bias, is_conv1d=True)
        output: Tensor = super().forward(x)
        return output
