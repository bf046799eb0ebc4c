"""DistributedDataParallel: torch's class over drivetrain's reducer, its transports, and its hang reports."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
