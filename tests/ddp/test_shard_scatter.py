"""Compares reduce-scatters of shard="gradients" with all-reduces: bits on every transport, and bytes on the wire."""

import contextlib
import inspect
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_cases import errors_of_survivors
from drivetrain import DistributedDataParallel
from drivetrain.ddp import sharding
from drivetrain.ddp import transport as transports
from effort import covering
from ranks import run_on

OnRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls

# Offsets of tcpi_bytes_sent and tcpi_bytes_received in Linux's struct tcp_info, and the end of these.
_BYTES_SENT, _BYTES_RECEIVED, _INFO_BYTES = 200, 128, 208


def bytes_by_connection() -> dict[str, Tensor]:
    """Returns the bytes that each TCP connection of this process has sent, and those received: int64 [2]."""
    found = {}
    for name in list(Path("/proc/self/fd").iterdir()):
        # Other threads close connections meanwhile.
        with contextlib.suppress(OSError):
            inode = str(name.readlink())
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name.name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                    found[inode] = torch.tensor(
                        [struct.unpack_from("<Q", info, at)[0] for at in (_BYTES_SENT, _BYTES_RECEIVED)]
                    )
    return found


def moved_since(before: dict[str, Tensor]) -> Tensor:
    """Returns the bytes sent and received since then. Connections of earlier wrappers may have been closed."""
    now = bytes_by_connection()
    return sum((now[each] - before.get(each, 0) for each in now), torch.zeros(2, dtype=torch.int64))


Shapes = tuple[tuple[int, ...], ...]
# All kinds of sizes; one is sent in several messages.
ALL_SIZES: Shapes = ((), (1,), (3,), (5, 7), (2, 300, 3), (0, 4), (1000, 513), (17,), (4096, 8))


WIRE_DTYPES = (torch.bfloat16, torch.float8_e5m2)


class Sizes(nn.Module):
    """Parameters of some shapes, whose gradients are the inputs."""

    def __init__(self, dtype: torch.dtype, shapes: Shapes) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(w.shape, generator=generator, device="cpu").to(w) for w in self.weights]
        return torch.stack([(w * x).sum().float() for w, x in zip(self.weights, inputs, strict=True)]).sum()


def wrapped(
    transport: str,
    ranks_per_host: int,
    groups: list[list[int]],
    dtype: torch.dtype,
    shapes: Shapes = ALL_SIZES,
    process_group: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Returns an unsharded and a sharded wrapper with the same buckets, on ranks that pretend to be on hosts."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next((group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), None)
    options: dict[str, Any] = {"transport": transport, "bucket_cap_mb": 1.0, "process_group": process_group}
    options["wire_dtype"] = wire_dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "host_identity", lambda: (str(dist.get_rank() // ranks_per_host),))
        plain = DistributedDataParallel(Sizes(dtype, shapes), **options)
        return plain, DistributedDataParallel(Sizes(dtype, shapes), shard="gradients", shard_group=mine, **options)


# ---- Bits.


def assert_equal_bits(plain: Any, net: Any, what: Any, steps: int = 2) -> None:
    for step in range(steps):
        for model in (plain, net):
            model.zero_grad()
            model(100 * step + dist.get_rank()).backward()
        for index, (a, b) in enumerate(zip(net.module.weights, plain.module.weights, strict=True)):
            assert isinstance(a.grad, DTensor)
            assert torch.equal(a.grad.full_tensor(), b.grad), (what, step, index)


def compare_bits(layouts: list[list[list[int]]]) -> None:
    hosts = (("torch", 1), ("shm", 2), ("shm", 4))[: dist.get_world_size()]
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    for groups, (transport, per_host), dtype in covering(1, layouts, hosts, dtypes):
        plain, net = wrapped(transport, per_host, groups, dtype)
        assert_equal_bits(plain, net, (groups, transport, per_host, dtype))


def compare_rounded_bits(layouts: list[list[list[int]]]) -> None:
    """Compares where values are rounded on the wire. Rounding errors of one step change the next step's bits."""
    width = 1 if layouts == [[]] else 2
    for groups, (transport, per_host), wire_dtype in covering(width, layouts, (("torch", 1), ("shm", 2)), WIRE_DTYPES):
        plain, net = wrapped(transport, per_host, groups, torch.float32, wire_dtype=wire_dtype)
        assert_equal_bits(plain, net, (groups, transport, per_host, wire_dtype), steps=4)


def test_scattered_sums_have_the_bits_of_all_reduced_ones_with_a_wire_dtype(
    on_ranks: OnRanks, on_three_ranks: OnRanks, on_four_ranks: OnRanks
) -> None:
    on_ranks(compare_rounded_bits, [[]])
    on_three_ranks(compare_rounded_bits, [[]])
    on_four_ranks(compare_rounded_bits, [[], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])


def compare_accumulated_bits(transport: str, per_host: int) -> None:
    """Compares sums over micro-batches, of which each is reduced, with all-reduces of the same micro-batches."""
    rank = dist.get_rank()
    for wire_dtype in WIRE_DTYPES:
        plain, net = wrapped(transport, per_host, [], torch.float32, wire_dtype=wire_dtype)
        for step in range(3):
            net.zero_grad()
            with net.no_sync():
                net(200 * step + rank).backward()
            net(200 * step + 100 + rank).backward()
            sums = [torch.zeros_like(weight) for weight in plain.module.weights]
            for seed in (200 * step + rank, 200 * step + 100 + rank):
                plain.zero_grad()
                plain(seed).backward()
                for total, weight in zip(sums, plain.module.weights, strict=True):
                    total += weight.grad
            for index, (weight, expected) in enumerate(zip(net.module.weights, sums, strict=True)):
                assert torch.equal(weight.grad.full_tensor(), expected), (transport, wire_dtype, step, index)


def test_rounding_errors_are_carried_over_micro_batches(on_three_ranks: OnRanks, on_four_ranks: OnRanks) -> None:
    on_three_ranks(compare_accumulated_bits, "torch", 1)
    on_four_ranks(compare_accumulated_bits, "shm", 2)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="needs a torch that keeps groups' order"
)
@run_on(4)
def test_groups_may_number_their_ranks_in_another_order() -> None:
    everyone = dist.new_group([3, 1, 0, 2], sort_ranks=False)
    for groups, (transport, per_host) in itertools.product(([], [[0, 3], [1, 2]]), (("torch", 1), ("shm", 2))):
        plain, net = wrapped(transport, per_host, groups, torch.float32, process_group=everyone)
        assert_equal_bits(plain, net, (groups, transport))


def test_scattered_sums_have_the_bits_of_all_reduced_ones(
    on_ranks: OnRanks, on_three_ranks: OnRanks, on_four_ranks: OnRanks
) -> None:
    on_ranks(compare_bits, [[]])
    on_three_ranks(compare_bits, [[]])
    on_four_ranks(compare_bits, [[], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])


@pytest.mark.parametrize("sizes", [[4], [2, 2], [2, 3], [3, 2, 4]], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (64, 2)], ids=str)
def test_every_element_belongs_to_one_rank_of_each_group(sizes: list[int], shape: tuple[int, ...]) -> None:
    places = [(rank, size) for size in sizes for rank in range(size)]
    param = torch.zeros(shape)
    ranges = sharding._owners(param, places)
    assert ranges == sorted(ranges)
    owners: list[set[int]] = [set() for _ in range(param.numel() if shape else 0)]
    for begin, end, ranks in ranges:
        assert len(ranks) == len(set(ranks)) == len(sizes)
        for element in range(begin, end):
            assert not owners[element]
            owners[element] = set(ranks)
    for element, ranks in enumerate(owners):
        row = element // (param.numel() // shape[0])
        expected = set()
        for rank, (number, size) in enumerate(places):
            first, last = sharding._rows(param, number, size)
            expected |= {rank} if first <= row < last else set()
        assert ranks == expected


def test_ranks_of_a_group_sum_equal_parts_of_their_rows() -> None:
    places = [(0, 2), (1, 2)] * 4
    ranges = sharding._owners(torch.zeros(16, 4), places)
    firsts = [ranks[0] for _, _, ranks in ranges]
    assert sorted(firsts) == list(range(8))
    assert {end - begin for begin, end, _ in ranges} == {8}


def count_groups_of_wrappers() -> list[int]:
    """Returns the process groups that exist after each of some wrappers of the same ranks."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    counts = []
    for _ in range(3):
        net = DistributedDataParallel(nn.Linear(8, 8), transport="torch", shard="gradients", shard_group=pair)
        net(torch.ones(2, 8)).sum().backward()
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts


def test_wrappers_share_the_group_of_second_exchanges(on_four_ranks: OnRanks) -> None:
    for counts in on_four_ranks(count_groups_of_wrappers):
        assert len(set(counts)) == 1, counts


# ---- Bytes.


def bytes_on_the_wire(cases: list[Any]) -> list[tuple[float, float]]:
    """Returns, for each case, the bytes per byte of gradients that a rank sends, or receives, without `shard` and with.

    The larger of the two counts.
    """
    found = []
    for (transport, per_host, groups, shapes, *_), wire_dtype in cases:
        models = wrapped(transport, per_host, groups, torch.float32, shapes, wire_dtype=wire_dtype)
        whole = sum(weight.nbytes for weight in models[0].module.weights)
        moved = []
        for model in models:
            steps = []
            for step in range(4):
                dist.barrier()
                before = bytes_by_connection()
                model(step).backward()
                dist.barrier()
                steps.append(int(moved_since(before).max()))
            moved.append(min(steps[1:]) / whole)  # the first may exchange plans, and others meet the store's traffic
        found.append((moved[0], moved[1]))
    return found


# The transport, the ranks of a host, the groups that share states, and the shapes of parameters. The last two are the
# busiest rank's expected bytes per byte of gradients without and with `shard`.
WIRE = [
    ("torch", 1, [], ALL_SIZES, 2 * 3 / 4, 3 / 4),
    ("torch", 1, [[0, 1], [2, 3]], ALL_SIZES, 2 * 3 / 4, 3 / 4 + 1 / 4),
    ("shm", 2, [], ALL_SIZES, 2 * 1 / 2, 1 / 2),
    ("shm", 2, [[0, 1], [2, 3]], ALL_SIZES, 2 * 1 / 2, 2 * 1 / 2),  # each host needs everything
    # The rank of the only row would receive 3; each rank with one of three rows receives 1.
    ("torch", 1, [], ((1, 300_000), (3, 100_000)), 2 * 3 / 4, (2 * 3 / 4 + 1) / 2),
]


# Bytes that travel for each byte of float32: float8 has a scale for every 256 values.
ON_WIRE = {None: 1.0, torch.bfloat16: 1 / 2, torch.float8_e5m2: 257 / 256 / 4}


def test_a_scatter_sends_what_other_ranks_need(on_four_ranks: OnRanks) -> None:
    cases = covering(1, WIRE, list(ON_WIRE))
    by_rank = on_four_ranks(bytes_on_the_wire, cases)
    for (case, wire_dtype), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        for moved, expected in zip(zip(*found, strict=True), case[4:], strict=True):
            assert max(moved) == pytest.approx(ON_WIRE[wire_dtype] * expected, rel=0.03), (case, found)


# ---- Ranks that die.

DYING_RANK = """
    import math, os, signal, time, torch, torch.distributed as dist
    from datetime import timedelta
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    options = {"transport": "torch", "bucket_cap_mb": 0.02, "report_hang_after": 1}
    model = DDP(net, shard="gradients", shard_group=pairs[rank // 2], **options)

    def die(_):
        if rank == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    net[3].weight.register_hook(die)
    for step in range(10_000):
        while step == 2 and any(map(math.isnan, model.stragglers())):
            time.sleep(0.05)  # until each has heard of the others
        model.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
"""


@pytest.mark.parametrize("wire_dtype", [None, torch.float8_e5m2], ids=str)
def test_the_others_name_a_rank_that_dies_in_a_scatter(tmp_path: Path, wire_dtype: torch.dtype | None) -> None:
    script = DYING_RANK.replace('"bucket_cap_mb": 0.02', f'"bucket_cap_mb": 0.02, "wire_dtype": {wire_dtype}')
    for error in errors_of_survivors(tmp_path, script):
        assert re.search(r"bucket \d+ of \d+ \[", error), error
        assert "Rank 3 has ended" in error, error
