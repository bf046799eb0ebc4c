"""Finds the samples that make a training's loss or gradients spike, for `drivetrain explain`."""
