"""Logical ranks: parts of the global batch that give the same bits on any number of ranks."""
