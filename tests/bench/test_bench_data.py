"""Runs the benchmark of loaders on a few small images."""

import pytest

from suite import data


def test_images_of_every_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_IMAGES", 40)
    monkeypatch.setattr(data, "_PIXELS", (96, 72))
    monkeypatch.setattr(data, "_SIZE", 8)
    counted: list[int] = []
    epochs = data._epochs

    def counting(loaders, step, rounds):  # type: ignore[no-untyped-def]
        counted.extend(sum(len(labels) for _, labels in loader) for loader in loaders)
        return epochs(loaders, step, rounds)

    monkeypatch.setattr(data, "_epochs", counting)
    plain, shares, streamed = data._measure_images(rounds=1)
    assert counted == [40, 40, 40]
    assert "webdataset" in streamed.what
    assert plain.ours == streamed.ours > 0
    assert 0 < shares.torch <= 100
    assert plain.target == ">= 4"
    assert plain.met is (plain.ratio >= 4)
