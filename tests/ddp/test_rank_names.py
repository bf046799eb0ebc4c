"""Checks that errors of a subgroup give a rank's number in the job and its number in the group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import DistributedDataParallel
from drivetrain.ddp import transport
from ranks import run_on

OnRanks = Callable[..., list[Any]]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, uses_both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if uses_both else x


@run_on(4)
def test_errors_of_a_subgroup() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    dist.barrier()  # a rank that leaves while another still connects fails it
    rank = dist.get_rank()
    group = groups[rank % 2]
    if rank % 2 == 0:
        return
    mine, other = ("rank 1 (rank 0 of its group)", "rank 3 (rank 1 of its group)")[:: 1 if rank == 1 else -1]
    x = torch.ones(2, 4)

    with pytest.raises(RuntimeError) as raised:
        DistributedDataParallel(TwoLayers(), process_group=group, check_replicas_every=rank)
    assert "rank 1 (rank 0 of its group): 1; rank 3 (rank 1 of its group): 3" in str(raised.value)

    model = DistributedDataParallel(TwoLayers(), process_group=group)
    model(x, uses_both=False).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        model(x, uses_both=True)
    assert f"did not receive grad for {mine}: second.weight, second.bias" in str(raised.value)

    model = DistributedDataParallel(TwoLayers(), process_group=group, check_replicas_every=1)
    with torch.no_grad():
        model.module.first.bias.fill_(rank)
    with pytest.raises(RuntimeError, match=r"equal within ranks \{[13]\}, \{[13]\}"):
        model(x, uses_both=True).sum().backward()

    comm = transport.make_comm("shm", group, torch.device("cpu"))
    with pytest.raises(RuntimeError) as raised:
        comm.all_reduce(comm.allocate(4096).view(torch.float32)[: 8 * rank], mean=False)
    assert mine in str(raised.value)
    assert other in str(raised.value)
