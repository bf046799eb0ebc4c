"""Checks of correctness on a GPU, each with findings of its own; --dry-run takes them through on the CPU.

python -m gpu_check.checks NAME [--dry-run] [--json FILE]
"""
