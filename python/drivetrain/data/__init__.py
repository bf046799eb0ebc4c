"""Data loading: a resumable sampler, batches loaded ahead, tokens in files, images, and samples left out or seeded."""

from .images import CachedImages
from .over_dataset import LeaveOut, SeededSamples
from .prefetch import Prefetcher, prefetch
from .sampler import ResumableSampler
from .tokens import TokenShards, write_token_shards

__all__ = [
    "CachedImages",
    "LeaveOut",
    "Prefetcher",
    "ResumableSampler",
    "SeededSamples",
    "TokenShards",
    "prefetch",
    "write_token_shards",
]
