"""Gradients between backward and the optimizer step: main gradients and fused weight gradients."""
