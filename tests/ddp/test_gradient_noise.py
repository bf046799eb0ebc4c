"""Tests the norms of gradients before and after their reduction, from which the gradient noise scale follows."""

import copy

import torch
import torch.distributed as dist

from ddp_cases import SMALL_BUCKETS, linear_chain
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on


def rank_inputs(step: int, rank: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(100 * step + rank))


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
