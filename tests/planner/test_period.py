"""Tests which iteration a plan takes for a step, and how a planned script sees loaders and launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_shadow import HEAD, planned

GAN = """
second = nn.Linear(300, 300); other = torch.optim.SGD(second.parameters(), 0.1)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(640, 300)), 8)):
    model(second(x).detach()).mean().backward(); optimizer.step(); optimizer.zero_grad()
    if step % {ratio} == 0:
        model(second(x)).mean().backward(); other.step(); other.zero_grad()
"""
LOOPS = {
    "two": (GAN.format(ratio=1), "1 batch, 1 step of Adam, 1 step of SGD", 8),
    "five to one": (GAN.format(ratio=5), "5 batches, 5 steps of Adam, 1 step of SGD", 40),
    "accumulate": (
        """
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(640, 300)), 8, num_workers=2, timeout=9)):
    model(x).mean().backward()
    if step % 4 == 0:
        optimizer.step(); optimizer.zero_grad()
""",
        "4 batches, 1 step of Adam",
        32,
    ),
    "workers": (
        """
class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id, 640, worker.num_workers):
            yield torch.randn(300)
loader = DataLoader(Stream(), 8, False, None, None, 2, prefetch_factor=4, persistent_workers=True)
assert loader.num_workers == 2 and loader.prefetch_factor == 4
batches = iter(loader)
for step in range(9):
    model(next(batches)).mean().backward(); optimizer.step(); optimizer.zero_grad()
""",
        "1 batch, 1 step of Adam",
        8,
    ),
    "rank": (
        "assert 'RANK' not in os.environ; torch.cuda.set_device(0); train(lambda step: None)",
        "1 step of Adam",
        0,
    ),
}


@pytest.mark.parametrize("name", list(LOOPS))
def test_a_step_is_an_iteration(name: str, tmp_path: Path) -> None:
    script, period, samples = LOOPS[name]
    folder = tmp_path / "home"
    folder.mkdir()
    done = planned(folder, HEAD + script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["period"] == period
    assert f"a step: {period}" in done.stdout
    assert min(figures[f"{phase}_s"] for phase in ("forward", "backward", "optimizer")) > 0
    assert round((figures["samples_per_s"] or 0) * figures["step_s"]) == samples
