"""Kills saves at random points, cuts the power at random points, and flips bits of stored checkpoints."""
