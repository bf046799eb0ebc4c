"""Data loading: a resumable sampler, batches loaded ahead, tokens in files, decoded images, and samples left out."""

from .images import CachedImages
from .leave_out import LeaveOut
from .prefetch import Prefetcher, prefetch
from .sampler import ResumableSampler
from .tokens import TokenShards, write_token_shards

__all__ = [
    "CachedImages",
    "LeaveOut",
    "Prefetcher",
    "ResumableSampler",
    "TokenShards",
    "prefetch",
    "write_token_shards",
]
