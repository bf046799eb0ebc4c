"""Kills saves at drawn points, cuts the power at drawn points, and flips bits of stored checkpoints."""
