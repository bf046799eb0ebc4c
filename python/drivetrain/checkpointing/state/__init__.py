"""Describes what a training is: captures its state as JSON and named tensors, and restores it."""
