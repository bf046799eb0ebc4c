"""Finds ranks that compute wrongly without an error: other ranks repeat what they computed, and compare the bits."""

from .check import ComputeCheck, ComputeError, check_compute

__all__ = ["ComputeCheck", "ComputeError", "check_compute"]
