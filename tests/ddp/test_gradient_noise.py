"""Tests the gradient noise scale against the estimator of its paper, computed from each rank's gradients in Python."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_cases import SMALL_BUCKETS, linear_chain
from drivetrain import DistributedDataParallel as DDP
from drivetrain import optim
from drivetrain.optim.statistics import NoiseScale
from ranks import run_on

TRANSPORTS = pytest.mark.parametrize("transport", ["torch", "shm"])
DIM = 512


def rank_inputs(step: int, rank: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(squares: list[tuple[float, float]], ranks: int, decay: float = 0.98) -> tuple[float, float]:
    """Returns |G|^2 and S (McCandlish et al. 2018, appendix A.1), for batches of 1 and of `ranks`."""
    weights = [decay ** (len(squares) - 1 - step) for step in range(len(squares))]
    small, big = (
        sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        for values in zip(*squares, strict=True)
    )
    return (ranks * big - small) / (ranks - 1), (small - big) / (1 - 1 / ranks)


@run_on(2, 3)
def test_norms_of_every_second_step() -> None:
    chain = linear_chain()
    wrapped = DDP(chain, **SMALL_BUCKETS)
    wrapped(rank_inputs(0, dist.get_rank())).sum().backward()
    assert wrapped.reducer.gradient_noise() is None
    wrapped.reducer.set_noise_every(2)
    for step in range(1, 6):
        chain.zero_grad()
        own = copy.deepcopy(chain)
        own(rank_inputs(step, dist.get_rank())).sum().backward()
        wrapped(rank_inputs(step, dist.get_rank())).sum().backward()
        expected = torch.stack([sum(p.grad.double().square().sum() for p in m.parameters()) for m in (own, chain)])
        dist.all_reduce(expected[0])
        found = wrapped.reducer.gradient_noise()
        assert found is not None
        assert found[:2] == (step + step % 2, dist.get_world_size())
        if step % 2:
            torch.testing.assert_close(found[2], expected, rtol=1e-6, atol=0)
    wrapped.reducer.set_noise_every(0)
    wrapped(rank_inputs(6, dist.get_rank())).sum().backward()
    assert wrapped.reducer.gradient_noise() is None


@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@run_on(2, 3)
def test_agrees_with_the_estimator_of_the_paper(transport: str, dtype: torch.dtype) -> None:
    """Also where gradients are clipped in place before the step."""
    chain = linear_chain().to(dtype)
    wrapped = DDP(chain, transport=transport, **SMALL_BUCKETS)
    alone = copy.deepcopy(chain)
    optimizer = optim.SGD(chain.named_parameters(), lr=0.0)
    ranks, squares = dist.get_world_size(), []
    with optimizer.statistics(2, wrapped) as statistics:
        for step in range(8):
            optimizer.zero_grad()
            wrapped(rank_inputs(step, dist.get_rank()).to(dtype)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(chain.parameters(), 1e-3)
            optimizer.step()
            own = []
            for rank in range(ranks):
                alone.zero_grad()
                alone(rank_inputs(step, rank).to(dtype)).pow(2).sum().backward()
                own.append(torch.cat([p.grad.double().flatten() for p in alone.parameters() if p.grad is not None]))
            if step % 2 == 0:
                of_ranks = sum(grad.square().sum().item() for grad in own) / ranks
                squares.append((of_ranks, (sum(own) / ranks).square().sum().item()))  # type: ignore[union-attr]
            assert statistics.latest is not None
            noise = statistics.latest.noise
            assert noise is not None
            assert (noise.ranks, noise.num_steps) == (ranks, step // 2 + 1)
            gradient, variance = reference(squares, ranks)
            tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
            assert noise.squares == pytest.approx(gradient, rel=tolerance)
            assert noise.variance == pytest.approx(variance, rel=tolerance)
            everywhere = [torch.zeros(()) for _ in range(ranks)]
            dist.all_gather(everywhere, torch.tensor(noise.scale))
            assert len({value.item() for value in everywhere}) == 1
        assert next(iter(statistics.latest.parameters)) == "0.weight"
    assert wrapped.reducer.gradient_noise() is None


@run_on(2)
def test_finds_a_known_noise_scale() -> None:
    """The gradient is 1 in every element, plus noise of a known variance; `scale` is within a tenth of their ratio."""
    variance = 5.0
    weight = nn.Linear(DIM, 1, bias=False)
    wrapped = DDP(weight)
    optimizer = optim.SGD(weight.parameters(), lr=0.0)
    random = torch.Generator().manual_seed(dist.get_rank())
    with optimizer.statistics(1, wrapped) as statistics:
        for _ in range(300):
            optimizer.zero_grad()
            wrapped(1 + math.sqrt(variance) * torch.randn(1, DIM, generator=random)).sum().backward()
            optimizer.step()
    assert statistics.latest is not None
    noise = statistics.latest.noise
    assert noise is not None
    assert noise.scale == pytest.approx(variance, rel=0.1)
    assert f"{noise.scale / 2:.2g} times the batch" in noise.advice()


@run_on(2)
def test_same_bits_with_and_without_and_with_the_check_of_gradients() -> None:
    models = [linear_chain()]
    models.append(copy.deepcopy(models[0]))
    wrapped = [DDP(model, check_gradients="raise", **SMALL_BUCKETS) for model in models]
    optimizers = [optim.AdamW(model.parameters()) for model in models]
    optimizers[0].statistics(3, wrapped[0])
    for step in range(7):
        for one, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            one(rank_inputs(step, dist.get_rank())).pow(2).sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@run_on(2)
def test_is_not_measured_where_the_mean_is_not_plain() -> None:
    chain = linear_chain()
    wrapped = DDP(chain)
    optimizer = optim.SGD(chain.parameters(), lr=0.1)
    optimizer.step_in_backward(wrapped)
    statistics = optimizer.statistics(1, wrapped)
    for step in range(2):
        wrapped(rank_inputs(step, dist.get_rank())).pow(2).sum().backward()
        optimizer.step()
    assert statistics.latest is not None
    assert statistics.latest.noise is None


def test_advice() -> None:
    for variance, words in ((40.0, "up to that much larger"), (2.0, "balances"), (0.1, "fewer samples")):
        assert words in NoiseScale(2, 1.0, variance, 10).advice()
    assert "hides" in NoiseScale(2, -1.0, 5.0, 10).advice()
    assert math.isnan(NoiseScale(2, 0.0, 0.0, 1).scale)
