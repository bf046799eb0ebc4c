"""Checks correctness on a GPU. Each check reports findings, and --dry-run runs it on the CPU.

python -m gpu_check.checks NAME [--dry-run] [--json FILE]
"""
