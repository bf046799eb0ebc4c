"""torch's own DistributedDataParallel tests, which ship in its wheel, run on two CPU ranks with either class."""
