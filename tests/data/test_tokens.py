"""Tests TokenShards and write_token_shards: windows against plain slices, files that are cut off, and bad arguments."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from drivetrain.data import TokenShards, write_token_shards


@given(st.lists(st.lists(st.integers(0, 65535), max_size=30), max_size=8), st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_windows_are_slices_of_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int, block_size: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    files = write_token_shards(documents, folder, shard_tokens=shard_tokens)
    tokens = [token for document in documents for token in document]
    shards = [tokens[i : i + shard_tokens] for i in range(0, len(tokens), shard_tokens)]
    assert [np.load(file).tolist() for file in files] == shards
    windows = [shard[i : i + block_size + 1] for shard in shards for i in range(0, len(shard) - block_size, block_size)]
    if not windows:
        with pytest.raises((ValueError, FileNotFoundError)):
            TokenShards(folder, block_size=block_size)
        return
    dataset = TokenShards(folder, block_size=block_size)
    found = [dataset[i] for i in range(len(dataset))]
    assert [inputs.tolist() for inputs, _ in found] == [window[:-1] for window in windows]
    assert [targets.tolist() for _, targets in found] == [window[1:] for window in windows]
    assert torch.equal(dataset[-1][0], found[-1][0])
    with pytest.raises(IndexError, match=f"index is {len(windows)}"):
        dataset[len(windows)]


def test_workers_map_the_files_themselves(tmp_path: Path) -> None:
    write_token_shards([torch.arange(1000) % 251], tmp_path, dtype="uint8", shard_tokens=300)
    dataset = TokenShards(tmp_path, block_size=16)
    assert len(pickle.dumps(dataset)) < 1000
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    expected = torch.stack([dataset[i][0] for i in range(len(dataset))])
    assert torch.equal(torch.cat([inputs for inputs, _ in loader]), expected)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ids 0 to 70000, which do not fit uint16"):
        write_token_shards([[0, 70000]], tmp_path)
    with pytest.raises(ValueError, match="float64 of shape"):
        write_token_shards([[0.5]], tmp_path)
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        write_token_shards([[1]], tmp_path, dtype="float32")
    with pytest.raises(ValueError, match="shard_tokens is 0"):
        write_token_shards([[1]], tmp_path, shard_tokens=0)
    assert list(tmp_path.iterdir()) == []
    write_token_shards([range(100)], tmp_path)
    with pytest.raises(FileExistsError, match=r"tokens_00000\.npy exists"):
        write_token_shards([[1]], tmp_path)
    cases: list[tuple[Any, Any, str]] = [
        (tmp_path / "none", 4, "no folder with"),
        (tmp_path, 0, "block_size is 0"),
        (tmp_path, 100, "no file has 101 tokens"),
    ]
    for files, block_size, message in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            TokenShards(files, block_size=block_size)
    np.save(tmp_path / "wide.npy", np.zeros((3, 3), dtype=np.int32))
    with pytest.raises(ValueError, match=r"wide\.npy has int32 of shape \(3, 3\)"):
        TokenShards(tmp_path, block_size=4)


def test_a_file_that_is_cut_off_raises(tmp_path: Path) -> None:
    (file,) = write_token_shards([range(1000)], tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is not a complete"):
        TokenShards([file], block_size=4)
