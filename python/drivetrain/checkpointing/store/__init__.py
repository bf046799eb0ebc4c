"""Commits checkpoints to directories and remote file systems, and finds, reads and verifies them."""
