"""Data loading: a sampler whose position can be saved, and restored at any offset and at another number of ranks."""

from .sampler import ResumableSampler

__all__ = ["ResumableSampler"]
