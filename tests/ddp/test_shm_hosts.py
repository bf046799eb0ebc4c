"""Tests shared memory within two hosts: network namespaces with a link between them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from faults.hosts import INTERFACE, IPV4
from namespaces import simulated_hosts

TWO_HOSTS = """
    import os, random, time, torch, torch.distributed as dist
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (1, 65, 70_000, 40_000)
            dtypes = (torch.float32, torch.bfloat16)
            self.weights = nn.ParameterList([torch.zeros(n, dtype=d) for d in dtypes for n in sizes])

        def forward(self, *inputs):
            return torch.stack([(w * x).sum().float() for w, x in zip(self.weights, inputs, strict=True)]).sum()

    def train(wire):
        model = DDP(Products(), bucket_cap_mb=0.1, find_unused_parameters=True, **wire)
        for step in range(20):
            inputs = [torch.full_like(w, ((step + i) % 8 + 1) * 1.001) for i, w in enumerate(model.module.weights)]
            model.zero_grad()
            model(*[x * (rank + 1) for x in inputs]).backward()
            for w, x in zip(model.module.weights, inputs, strict=True):
                tolerance = 1e-2 if wire or w.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(w.grad, x * ((world + 1) / 2), rtol=tolerance, atol=0)
                is_rounded = torch.equal(w.grad, w.grad.bfloat16().to(w.dtype))
                assert is_rounded == bool(wire or w.dtype == torch.bfloat16)
                grads = [torch.empty_like(w) for _ in range(world)]
                dist.all_gather(grads, w.grad)
                assert all(torch.equal(grads[0], other) for other in grads)

        # Two modules in one backward on late ranks bring their buckets to the leaders in any order.
        models = [DDP(Products(), bucket_cap_mb=0.1, **wire) for _ in range(2)]
        weights = [w for each in models for w in each.module.weights]
        dawdle = random.Random(rank)
        for weight in weights:
            weight.register_hook(lambda grad: time.sleep(dawdle.random() * 3e-3) if dawdle.random() < 0.2 else None)
        for step in range(30):
            factors = [torch.full_like(w, (step * 7 + i * 3) % 16 + 1) for i, w in enumerate(weights)]
            losses = [each(*[x * world for x in factors[8 * i : 8 * i + 8]]) for i, each in enumerate(models)]
            sum(losses).backward()
            for weight, x in zip(weights, factors, strict=True):
                assert torch.equal(weight.grad, x * world), step
            for each in models:
                each.zero_grad()
        # The ranks share the pipe, and print() would write in pieces.
        transport = model._get_ddp_logging_data()["transport"]
        os.write(1, ("rank %d of %d %s, %s\\n" % (rank, world, transport, "wire" if wire else "as it is")).encode())

    for wire in ({}, {"wire_dtype": torch.bfloat16}):
        train(wire)

    # The rounding error of float8 is carried to the next step, so that the mean over steps comes close to the exact
    # mean.
    model = DDP(Products(), bucket_cap_mb=0.1, wire_dtype=torch.float8_e5m2)
    weights = [w for w in model.module.weights if w.dtype == torch.float32]
    seeded = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(len(w), generator=seeded).to(w.dtype) for w in model.module.weights]
    means = [torch.zeros(len(w)) for w in weights]
    for step in range(46):
        model.zero_grad()
        model(*inputs).backward()
        for mean, w in zip(means, weights, strict=True):
            mean += w.grad / 40 if step >= 6 else 0  # by then the buckets are as they stay
            grads = [torch.empty_like(w) for _ in range(world)]
            dist.all_gather(grads, w.grad)
            assert all(torch.equal(grads[0], other) for other in grads)
    for mean, w, x in zip(means, weights, inputs, strict=False):
        exact, last = x.clone(), w.grad.clone()
        dist.all_reduce(exact)
        exact /= world
        if len(x) > 1:
            assert 0.02 < (last - exact).norm() / exact.norm() < 0.2
            assert (mean - exact).norm() / exact.norm() < 0.01
    if rank == 0:
        os.write(1, b"float8\\n")
    model = DDP(Products())
    loss = model(*[torch.ones_like(w) for w in model.module.weights])
    try:
        model.backward(loss, weight=2.0 if rank == world - 1 else None)
    except RuntimeError as error:
        assert "the ranks start different collectives: " in str(error) and f"rank {world - 1} " in str(error), error
    else:
        raise AssertionError("ranks of two hosts summed what does not belong together")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks_per_host", [(2, 2), (2, 1)], ids=str)
def test_two_hosts(tmp_path: Path, ranks_per_host: tuple[int, int]) -> None:
    with simulated_hosts(2) as hosts:
        results, codes = launch(hosts.names, tmp_path, ranks_per_host)
    assert codes == [0, 0], results
    world = sum(ranks_per_host)
    said = sorted(line for out, _ in results for line in out.splitlines())
    assert said.pop(0) == "float8"
    assert said == [f"rank {rank} of {world} shm, {wire}" for rank in range(world) for wire in ("as it is", "wire")]


def launch(
    hosts: list[str], tmp_path: Path, ranks_per_host: tuple[int, int]
) -> tuple[list[tuple[str, str]], list[int]]:
    """Runs the script on both hosts, and returns what each launcher has printed, and their exit codes."""
    script = tmp_path / "hosts.py"
    script.write_text(textwrap.dedent(TWO_HOSTS))
    master = IPV4.format(1).partition("/")[0]
    launchers = [
        subprocess.Popen(
            [
                *["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"],
                *["--node-rank", str(node), "--nproc-per-node", str(count)],
                *["--master-addr", master, "--master-port", "29500", str(script)],
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, (name, count) in enumerate(zip(hosts, ranks_per_host, strict=True))
    ]
    try:
        results = [launcher.communicate(timeout=120) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
    return results, [launcher.returncode for launcher in launchers]
