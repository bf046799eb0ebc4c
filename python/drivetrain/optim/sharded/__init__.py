"""Parameters of which each rank steps a part: DTensors, the rows of DistributedDataParallel(shard=...), and experts."""
