"""Hugging Face's Conv1D after fuse_wgrad(): in a module of its own, which imports transformers."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from .. import _C
from .fuse_wgrad import is_plain


class Conv1D(TransformersConv1D):
    """As transformers', a linear layer whose weight is [inputs, outputs]."""

    def forward(self, x: Tensor) -> Tensor:
        """As transformers'."""
        if is_plain(x):
            return _C.fused_linear(x, self.weight, self.bias, is_conv1d=True)
        output: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return output
