"""Runs torch's own DistributedDataParallel tests, which its wheel contains, on two CPU ranks with either class."""
