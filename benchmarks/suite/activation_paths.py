"""Measures what steps keep under a plan that was made for a step with other operations, or with other shapes."""

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.bench.measure import Row
from drivetrain.budget import activation_budget

from .activation_batches import TARGET

_STEPS = 6  # of each kind
_MIB = 2**20
_WIDTH, _VOCABULARY = 64, 50
Arguments = tuple[Any, ...]


@dataclass
class Case:
    """A model, the arguments of its planned step, and a function that draws arguments of another step."""

    name: str
    model: nn.Module
    planned: Arguments
    draw: Callable[[], Arguments]
    share: str = "40%"


class StochasticDepth(nn.Module):
    """Transformer blocks of which a step leaves some out (Huang et al. 2016, arXiv:1603.09382)."""

    def __init__(self, blocks: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True, norm_first=True) for _ in range(blocks)
        )

    def forward(self, x: Tensor, are_used: list[bool]) -> Tensor:
        for block, is_used in zip(self.blocks, are_used, strict=True):
            x = block(x) if is_used else x
        return x.square().mean()


Tree = list[Any]  # its children


class TreeLstm(nn.Module):
    """A child-sum TreeLSTM (Tai et al. 2015, arXiv:1503.00075), which calls its cell node by node."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.forget = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.of_children, self.of_child = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH)
        self.classify = nn.Linear(_WIDTH, 5)

    def node(self, inputs: Iterator[Tensor], tree: Tree) -> tuple[Tensor, Tensor]:
        x = next(inputs)
        children = [self.node(inputs, child) for child in tree]
        gates = self.gates(x)
        if children:
            hidden, cells = torch.stack([h for h, _ in children]), torch.stack([c for _, c in children])
            gates = gates + self.of_children(hidden.sum(0))
        i, o, u = gates.chunk(3, -1)
        cell = i.sigmoid() * u.tanh()
        if children:
            cell = cell + (torch.sigmoid(self.forget(x) + self.of_child(hidden)) * cells).sum(0)
        return o.sigmoid() * cell.tanh(), cell

    def forward(self, x: Tensor, labels: Tensor, tree: Tree) -> Tensor:
        return F.cross_entropy(self.classify(self.node(iter(x), tree)[0]), labels)


class ScheduledSampling(nn.Module):
    """A decoder that reads its own tokens in some positions (Bengio et al. 2015, arXiv:1506.03099)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(_VOCABULARY, _WIDTH), nn.GRUCell(_WIDTH, _WIDTH)
        self.attend, self.out = nn.Linear(_WIDTH, _WIDTH), nn.Linear(2 * _WIDTH, _VOCABULARY)

    def forward(self, ids: Tensor, memory: Tensor, are_given: list[bool]) -> Tensor:
        hidden, tokens, losses = memory[:, 0], ids[:, 0], []
        for at, is_given in enumerate(are_given, 1):
            hidden = self.cell(self.embed(tokens), hidden)
            weights = (self.attend(hidden)[:, None] * memory).sum(-1).softmax(-1)
            logits = self.out(torch.cat([hidden, (weights[..., None] * memory).sum(1)], -1))
            losses.append(F.cross_entropy(logits, ids[:, at]))
            tokens = ids[:, at] if is_given else torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
        return torch.stack(losses).mean()


class Convolutions(nn.Module):
    """Residual blocks, each of which may have another activation or be left out."""

    def __init__(self, blocks: int = 16, channels: int = 16) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(blocks))

    def forward(self, x: Tensor, activations: list[Callable[[Tensor], Tensor] | None]) -> Tensor:
        for convolution, norm, activation in zip(self.convolutions, self.norms, activations, strict=True):
            if activation is not None:
                x = x + activation(norm(convolution(x)))
        return x.square().mean()


class TwoWays(nn.Module):
    """A model whose second way has no operation of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(16))
        self.shifts = nn.ParameterList(torch.randn(_WIDTH) for _ in range(32))

    def forward(self, x: Tensor, is_second: bool) -> Tensor:
        if is_second:
            for shift in self.shifts:
                x = (x - shift).sigmoid().sin()
        else:
            for layer in self.layers:
                x = F.gelu(layer(x))
        return x.square().mean()


def drawn_tree(draw: random.Random, nodes: int) -> Tree:
    """Returns a tree with this many nodes."""
    tree: Tree = []
    nodes -= 1
    while nodes > 0:
        size = draw.randint(1, nodes)
        tree.append(drawn_tree(draw, size))
        nodes -= size
    return tree


def cases() -> Iterator[Case]:
    draw = random.Random(0)
    drawn: Callable[[], Arguments]
    torch.manual_seed(0)
    x = torch.randn(4, 32, _WIDTH)
    for rate in (0.2, 0.5):
        name = f"stochastic depth, {rate:.0%} of 12 blocks left out"
        drawn = functools.partial(lambda rate: (x, [draw.random() > rate for _ in range(12)]), rate)
        yield Case(name, StochasticDepth(), (x, [True] * 12), drawn)
    ids, memory = torch.randint(0, _VOCABULARY, (16, 25)), torch.randn(16, 10, _WIDTH)
    drawn = lambda: (ids, memory, [draw.random() > 0.5 for _ in range(24)])  # noqa: E731
    # Memory that a GRU cell on the CPU writes in parts is always kept, so smaller budgets are impossible.
    yield Case("scheduled sampling", ScheduledSampling(), (ids, memory, [True] * 24), drawn, "85%")
    image = torch.randn(4, 16, 16, 16)
    kinds: list[Any] = [None, F.relu, F.relu, F.relu, F.silu]
    drawn = lambda: (image, [draw.choice(kinds) for _ in range(16)])  # noqa: E731
    yield Case("convolutions, other activations", Convolutions(), (image, [F.relu] * 16), drawn)
    rows = torch.randn(256, _WIDTH)
    yield Case("no planned operation", TwoWays(), (rows, False), lambda: (rows, True))
    words, labels = torch.randn(60, 8, _WIDTH), torch.randint(0, 5, (8,))
    drawn = lambda: (words, labels, drawn_tree(draw, 60))  # noqa: E731
    yield Case("trees of 60 nodes", TreeLstm(), drawn(), drawn)


def kept_of(case: Case) -> tuple[int, int]:
    """Returns the budget, and the most bytes that a step keeps.

    Raises:
        AssertionError: A gradient differs from the gradient without a budget.
    """

    def gradients(*arguments: Any) -> list[Tensor | None]:
        case.model.zero_grad()
        torch.manual_seed(1)
        case.model(*arguments).backward()
        return [None if param.grad is None else param.grad.clone() for param in case.model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a step above the budget
        plan = activation_budget(case.model, lambda: gradients(*case.planned), case.share)
        plan.remove()
        kept = 0
        for _ in range(_STEPS):
            arguments = case.draw()
            expected = gradients(*arguments)
            again = activation_budget(case.model, plan=plan.to_dict())
            found = gradients(*arguments)
            for a, b in zip(found, expected, strict=True):
                assert a is b if a is None or b is None else torch.equal(a, b), case.name
            kept = max(kept, again.peak_bytes)
            again.remove()
    return plan.budget_bytes, kept


def rows() -> Iterator[Row]:
    """Yields a row per kind of path: the budget, and what the step that keeps the most of it keeps."""
    for case in cases():
        budget, kept = kept_of(case)
        what = f"{case.name}: budget of {case.share} of another step, and the most that {_STEPS} steps keep"
        ratio = kept / budget
        yield Row(what, "MiB", budget / _MIB, kept / _MIB, ratio, target=f"<= {TARGET}", met=ratio <= TARGET)
