"""Recommends identifiers to files of Python's standard library, with two towers over sparse embeddings.

A file and an identifier that occurs in it form a pair, as a user and an item that the user has bought. Most rows of an
embedding get no gradient in a step, so gradients are sparse.

torchrun --nproc-per-node 2 benchmarks/tasks/recommender.py --engine torch
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from task_job import Job, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F

MINIMUM_FILES = 3  # in which an identifier occurs
NEGATIVES = 8  # drawn identifiers per pair
HELD_OUT_PERCENT = 10


class TwoTowers(nn.Module):
    """Scores a file and an identifier by the product of their vectors."""

    def __init__(self, num_files: int, num_identifiers: int, width: int = 32) -> None:
        super().__init__()
        self.files = nn.Embedding(num_files, width, sparse=True)
        self.identifiers = nn.Embedding(num_identifiers, width, sparse=True)
        self.file_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.identifier_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, files: Tensor, identifiers: Tensor) -> Tensor:
        """Return scores [pairs, candidates] of files [pairs] and identifiers [pairs, candidates]."""
        file = self.file_tower(self.files(files))
        candidates = self.identifier_tower(self.identifiers(identifiers))
        return torch.einsum("pw,pcw->pc", file, candidates)


def load_pairs() -> tuple[Tensor, int, int]:
    """Return pairs (file, identifier), int64 [pairs, 2], and the numbers of files and identifiers."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    words = [sorted(set(re.findall(r"[A-Za-z_]\w{3,}", path.read_text(errors="replace")))) for path in names]
    counts = Counter(word for of_file in words for word in of_file)
    number = {word: index for index, word in enumerate(w for w, count in counts.items() if count >= MINIMUM_FILES)}
    pairs = [(file, number[word]) for file, of_file in enumerate(words) for word in of_file if word in number]
    return torch.tensor(pairs), len(names), len(number)


def main() -> None:
    args = parse_arguments(__doc__, num_steps=200, batch_size=256).parse_args()
    with Job(args) as job:
        pairs, num_files, num_identifiers = load_pairs()
        pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))].to(job.device)
        train, held_out = pairs.split(
            [len(pairs) - len(pairs) * HELD_OUT_PERCENT // 100, len(pairs) * HELD_OUT_PERCENT // 100]
        )
        net = TwoTowers(num_files, num_identifiers).to(job.device)
        model = job.DistributedDataParallel(net)
        optimizer = job.optim.Adagrad(model.parameters(), lr=0.05)  # steps sparse and dense gradients

        def candidates(positive: Tensor, generator: torch.Generator) -> Tensor:
            drawn = torch.randint(num_identifiers, (len(positive), NEGATIVES), generator=generator).to(job.device)
            return torch.cat([positive[:, None], drawn], dim=1)

        for step in job.steps():
            generator = job.generator(step)
            rows = torch.randint(len(train), (args.batch_size,), generator=generator)
            files, positive = train[rows.to(job.device)].unbind(1)
            scores = model(files, candidates(positive, generator))
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.note(loss)
        with torch.no_grad():
            files, positive = held_out[:4096].unbind(1)
            scores = net(files, candidates(positive, job.generator(args.steps)))
        job.result("held-out hit rate", (scores.argmax(1) == 0).float().mean().item())


if __name__ == "__main__":
    main()
