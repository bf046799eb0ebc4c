"""Data loading: a resumable sampler, batches loaded ahead, memory-mapped tokens, and a cache of decoded images."""

from .images import CachedImages
from .prefetch import Prefetcher, prefetch
from .sampler import ResumableSampler
from .tokens import TokenShards, write_token_shards

__all__ = ["CachedImages", "Prefetcher", "ResumableSampler", "TokenShards", "prefetch", "write_token_shards"]
