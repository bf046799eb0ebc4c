"""Collects the stand-in's own tests only where it is preloaded. `make test-fake-cuda` runs them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_cuda

collect_ignore_glob = [] if fake_cuda.is_loaded() else ["test_*.py"]
