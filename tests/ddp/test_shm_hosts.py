"""Tests shared memory within two hosts: network namespaces with a link between them."""

import os
import subprocess
import textwrap
from pathlib import Path

from faults.hosts import INTERFACE, IPV4
from namespaces import simulated_hosts
from warm_python import warm_python

TWO_HOSTS = """
    import os, random, time, torch, torch.distributed as dist
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (1, 65, 70_000, 40_000)
            dtypes = (torch.float32, torch.bfloat16)
            self.weights = nn.ParameterList([torch.zeros(n, dtype=d) for d in dtypes for n in sizes])

        def forward(self, *inputs):
            return torch.stack([(w * x).sum().float() for w, x in zip(self.weights, inputs, strict=True)]).sum()

    def assert_equal_on_ranks(grad, world, group):
        grads = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(grads, grad, group=group)
        assert all(torch.equal(grads[0], other) for other in grads)

    def train(world, group, **wire):
        model = DDP(Products(), bucket_cap_mb=0.1, find_unused_parameters=True, process_group=group, **wire)
        for step in range(8):
            inputs = [torch.full_like(w, ((step + i) % 8 + 1) * 1.001) for i, w in enumerate(model.module.weights)]
            model.zero_grad()
            model(*[x * (rank + 1) for x in inputs]).backward()
            for w, x in zip(model.module.weights, inputs, strict=True):
                tolerance = 1e-2 if wire or w.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(w.grad, x * ((world + 1) / 2), rtol=tolerance, atol=0)
                is_rounded = torch.equal(w.grad, w.grad.bfloat16().to(w.dtype))
                assert is_rounded == bool(wire or w.dtype == torch.bfloat16)
                assert_equal_on_ranks(w.grad, world, group)

        # Two modules in one backward on late ranks bring their buckets to the leaders in any order.
        models = [DDP(Products(), bucket_cap_mb=0.1, process_group=group, **wire) for _ in range(2)]
        weights = [w for each in models for w in each.module.weights]
        dawdle = random.Random(rank)
        for weight in weights:
            weight.register_hook(lambda grad: time.sleep(dawdle.random() * 3e-3) if dawdle.random() < 0.2 else None)
        for step in range(12):
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

    def train_in_float8(world, group):
        # The rounding error is carried to the next step, so that the mean over steps comes close to the exact mean.
        model = DDP(Products(), bucket_cap_mb=0.1, wire_dtype=torch.float8_e5m2, process_group=group)
        weights = [w for w in model.module.weights if w.dtype == torch.float32]
        seeded = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(len(w), generator=seeded).to(w.dtype) for w in model.module.weights]
        means = [torch.zeros(len(w)) for w in weights]
        for step in range(46):
            model.zero_grad()
            model(*inputs).backward()
            for mean, w in zip(means, weights, strict=True):
                mean += w.grad / 40 if step >= 6 else 0  # by then the buckets are as they stay
                assert_equal_on_ranks(w.grad, world, group)
        for mean, w, x in zip(means, weights, inputs, strict=False):
            exact, last = x.clone(), w.grad.clone()
            dist.all_reduce(exact, group=group)
            exact /= world
            if len(x) > 1:
                assert 0.02 < (last - exact).norm() / exact.norm() < 0.2
                assert (mean - exact).norm() / exact.norm() < 0.01
        os.write(1, ("rank %d of %d, float8\\n" % (rank, world)).encode())

    for world, group in ((3, dist.new_group(range(3))), (4, dist.group.WORLD)):
        if rank >= world:
            continue
        train(world, group)
        train(world, group, wire_dtype=torch.bfloat16)
        train_in_float8(world, group)
        model = DDP(Products(), process_group=group)
        loss = model(*[torch.ones_like(w) for w in model.module.weights])
        try:
            model.backward(loss, weight=2.0 if rank == world - 1 else None)
        except RuntimeError as error:
            assert "the ranks start different collectives: " in str(error) and f"rank {world - 1} " in str(error), error
        else:
            raise AssertionError("ranks of two hosts summed what does not belong together")
    dist.destroy_process_group()
"""


def test_two_hosts(tmp_path: Path) -> None:
    """Trains on all four ranks, and on three of them, of which one is alone on its host."""
    with simulated_hosts(2) as hosts:
        results = launch(hosts.names, tmp_path)
    assert [code for _, _, code in results] == [0] * 4, results
    said = sorted(line for out, _, _ in results for line in out.splitlines())
    expected = ((rank, world) for world in (3, 4) for rank in range(world))
    whats = ("%s of %s shm, as it is", "%s of %s shm, wire", "%s of %s, float8")
    assert said == sorted(f"rank {what % pair}" for pair in expected for what in whats)


def launch(hosts: list[str], tmp_path: Path) -> list[tuple[str, str, int]]:
    """Runs the script on two ranks of each host, and returns their output, errors and exit codes."""
    script = tmp_path / "hosts.py"
    script.write_text(textwrap.dedent(TWO_HOSTS))
    master = IPV4.format(1).partition("/")[0]
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "WORLD_SIZE": "4", "MASTER_ADDR": master, "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", hosts[rank // 2], warm_python(has_whole_end=True), str(script)],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        return [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
