"""Implements `make gpu-check`: tests and measures drivetrain on an NVIDIA GPU, in parts, and writes a report."""
