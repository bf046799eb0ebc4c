"""Gradients between backward and the optimizer step: accumulation, clipping, main gradients, fused weight gradients."""
