"""`OverDataset`: a dataset that gives the samples of another one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class OverDataset(Dataset[Any]):
    """Has the length and the further attributes of a map-style dataset, but no methods that Python's protocols use."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Pickle asks before there is a dataset. DataLoader asks for __getitems__, which would pass this class by.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)
