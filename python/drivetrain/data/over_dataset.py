"""`OverDataset`: a dataset that gives the samples of another one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class OverDataset(Dataset[Any]):
    """Has the length and the further attributes of a map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # pickle asks before there is one
            raise AttributeError(name)
        return getattr(self.dataset, name)
