"""Data loading: a resumable sampler, batches loaded ahead, tokens in files, images, and samples left out or seeded."""

from .images import CachedImages
from .leave_out import LeaveOut
from .prefetch import Prefetcher, prefetch
from .sampler import ResumableSampler
from .seeded_samples import SeededSamples
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
