"""Tests Muon where ranks share its matrices, against steps that every rank computes: the bits must be equal.

tests/ddp/shard_nccl_ranks.py runs a part of it on another default device, whose products may differ in last bits.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import drivetrain
from drivetrain import optim
from ranks import run_on

# Several shapes, of which some repeat, and one matrix in columns.
SHAPES = [(64, 48), (48, 64), (32, 32), (7, 1), (5, 3), (48, 64), (129, 31), (96, 40)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ns_steps": 4, "max_grad_norm": 1.0},
    {"ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw"},
    {"ns_steps": 0},
]


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns the same values on every rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def parameters(shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(shape, seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def matrices_in(step: Callable[[], object]) -> int:
    """Returns the number of matrices in the batched products of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    return sum(event.input_shapes[0][0] for event in profile.events() if event.name == "aten::bmm")


def train(params: list[Any], optimizer: Any, steps: int = 3) -> int:
    """Steps with equal gradients on every rank, and returns the number of matrices that this rank multiplied."""
    for step in range(steps):
        for index, param in enumerate(params):
            grad = values(tuple(param.shape), 1000 * step + index).to(param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        if step < steps - 1:
            optimizer.step()
    return matrices_in(optimizer.step)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def expect_equal(shared: list[Any], of_shared: Any, alone: list[Any], of_alone: Any, name: str = "") -> None:
    for one, other in zip(shared, alone, strict=True):
        if other.is_cuda:
            torch.testing.assert_close(whole(one), whole(other), rtol=0, atol=1e-4)
        else:
            assert torch.equal(whole(one), whole(other)), (name, tuple(other.shape))
        for entry, value in of_alone.state[other].items():
            assert torch.equal(whole(of_shared.state[one][entry]), whole(value)), (name, entry)


def expect_shared(own: int, alone: int, num_ranks: int, name: str = "") -> None:
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(counts, torch.tensor(own))
    assert sum(map(int, counts)) == alone, (name, counts, alone)
    assert max(map(int, counts)) < alone, name


def whole_matrices(num_ranks: int) -> None:
    columns = values((20, 30), 99).t().requires_grad_()
    for options in [*OPTIONS, {"state_bits": 8, "min_8bit_size": 0}, {"master_bits": 24, "state_bits": 8}]:
        dtype = torch.bfloat16 if "master_bits" in options else torch.float32
        shared, alone = ([*parameters(SHAPES, dtype), columns.detach().clone().requires_grad_()] for _ in range(2))
        ours = optim.Muon(shared, process_group=dist.group.WORLD, **options)
        theirs = optim.Muon(alone, **options)
        own, all_of_them = train(shared, ours), train(alone, theirs)
        expect_equal(shared, ours, alone, theirs, str(options))
        if options.get("ns_steps") != 0:
            expect_shared(own, all_of_them, num_ranks, str(options))


@run_on(2)
def test_two_ranks_share_whole_matrices() -> None:
    whole_matrices(2)


@run_on(3)
def test_three_ranks_share_whole_matrices() -> None:
    whole_matrices(3)


@run_on(2)
def test_rows_have_storage_formats() -> None:
    """Rows are whole blocks of 256 elements, so that 8-bit states have the bits of whole ones."""
    mesh = init_device_mesh("cpu", (2,))
    for options in ({"state_bits": 8, "min_8bit_size": 0}, {"master_bits": 24, "state_bits": 16}):
        dtype = torch.bfloat16 if "master_bits" in options else torch.float32
        start = [values((64, 48), 1).to(dtype), values((32, 64), 2).to(dtype)]
        shared: list[Any] = [nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])) for param in start]
        alone = [param.clone().requires_grad_() for param in start]
        ours, theirs = optim.Muon(shared, **options), optim.Muon(alone, **options)
        train(shared, ours)
        train(alone, theirs)
        for one, other in zip(shared, alone, strict=True):
            assert torch.equal(whole(one), other), options


def rows(sizes: tuple[int, ...]) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
    )
    placements = [*[Replicate()] * (len(sizes) - 1), Shard(0)]
    for options in OPTIONS:
        shared: list[Any] = [
            nn.Parameter(distribute_tensor(values(shape, seed), mesh, placements)) for seed, shape in enumerate(SHAPES)
        ]
        alone = parameters(SHAPES)
        ours, theirs = optim.Muon(shared, **options), optim.Muon(alone, **options)
        own, all_of_them = train(shared, ours), train(alone, theirs)
        if "max_grad_norm" not in options:  # The ranks' sums are added in another order.
            expect_equal(shared, ours, alone, theirs, str(options))
        if options.get("ns_steps") != 0:
            expect_shared(own, all_of_them * (sizes[0] if len(sizes) > 1 else 1), dist.get_world_size(), str(options))


@run_on(3)
def test_ranks_share_the_matrices_whose_rows_they_hold() -> None:
    rows((3,))


@run_on(4)
def test_ranks_of_a_replica_share_rows() -> None:
    rows((2, 2))


@run_on(2)
def test_fully_shard_and_shard_train_as_one_rank_does() -> None:
    """Both engines' own losses and gradients; only the sums over ranks may differ, so steps start from equal ones."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False))

    inputs = values((8, 24), 7)
    found = []
    for engine in ("alone", "fully_shard", "shard"):
        net: nn.Module = model()
        if engine == "fully_shard":
            fully_shard(net)
        elif engine == "shard":
            net = drivetrain.DistributedDataParallel(net, shard="optimizer")
        optimizer = optim.Muon(net.parameters(), lr=0.05)
        for _ in range(3):
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(param) for param in net.parameters()])
    for engine, params in zip(("fully_shard", "shard"), found[1:], strict=True):
        for one, other in zip(params, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3, msg=lambda text, engine=engine: engine + text)


@run_on(2)
def test_exchanges_of_several_rounds() -> None:
    """Each rank has more elements than one round takes."""
    shapes = [(30_000, 70)] * 9
    mesh = init_device_mesh("cpu", (2,))
    alone = parameters(shapes)
    theirs = optim.Muon(alone, ns_steps=1)
    train(alone, theirs, steps=1)
    shared: list[Any] = parameters(shapes)
    ours = optim.Muon(shared, ns_steps=1, process_group=dist.group.WORLD)
    train(shared, ours, steps=1)
    expect_equal(shared, ours, alone, theirs)
    shared = [nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])) for param in parameters(shapes)]
    ours = optim.Muon(shared, ns_steps=1)
    train(shared, ours, steps=1)
    expect_equal(shared, ours, alone, theirs)


@run_on(2)
def test_matrices_that_leave_a_rank_without_rows_are_gathered() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement, shape in ((Shard(0), (1, 6)), (Shard(1), (6, 8))):
        shared: list[Any] = [nn.Parameter(distribute_tensor(values(shape, 1), mesh, [placement]))]
        alone = [values(shape, 1).requires_grad_()]
        ours, theirs = optim.Muon(shared), optim.Muon(alone)
        train(shared, ours)
        train(alone, theirs)
        expect_equal(shared, ours, alone, theirs, str(placement))


def _set_grads(params: list[Tensor], value: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)


@run_on(2)
def test_other_matrices_on_a_rank_raise_on_every_rank() -> None:
    """The check comes before the first change, covers matrices of every dtype, and a rank may have none of them."""
    kinds = [[torch.float32] * 3, [torch.float64, torch.float32, torch.float32]]
    for dtypes, number in ((dtypes, number) for dtypes in kinds for number in (0, 2)):
        params = [values((4, 6), seed).to(dtype).requires_grad_() for seed, dtype in enumerate(dtypes)]
        before = copy.deepcopy(params)
        optimizer = optim.Muon(params, process_group=dist.group.WORLD)
        _set_grads(params[(3 - number) * (dist.get_rank() == 0) :])
        with pytest.raises(ValueError, match=r"rank \d steps \d matrices with \d+ elements, and rank \d steps"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert not optimizer.state
        _set_grads(params)
        optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@run_on(2)
def test_a_rank_without_matrices_waits_without_the_gil() -> None:
    """Rank 0 comes to the step once a thread of rank 1, which waits there, has run."""
    params = parameters([(4, 6)])
    optimizer = optim.Muon(params, process_group=dist.group.WORLD)
    store: Any = dist.distributed_c10d._get_default_store()
    thread = threading.Thread(target=lambda: (time.sleep(0.5), store.set("thread", "ran")))
    if dist.get_rank() == 1:
        thread.start()
    else:
        _set_grads(params)
        store.wait(["thread"], timedelta(seconds=10))
    with pytest.raises(ValueError, match="rank 1 steps 0 matrices"):
        optimizer.step()
    if dist.get_rank() == 1:
        thread.join()


@run_on(2)
def test_gradients_that_are_not_reduced_raise_on_every_rank() -> None:
    """One rank would skip the step."""
    params = parameters([(4, 6)])
    before = copy.deepcopy(params)
    optimizer = optim.Muon(params, process_group=dist.group.WORLD, max_grad_norm=1.0)
    _set_grads(params, float("nan") if dist.get_rank() == 0 else 1.0)
    with pytest.raises(ValueError, match="rank 0 skips 0 matrices"):
        optimizer.step()
    assert torch.equal(params[0], before[0])


@run_on(2)
def test_a_rank_without_a_gradient_changes_no_other_parameter() -> None:
    """Rows of matrices and AdamW's parameters are stepped together or not at all."""
    mesh = init_device_mesh("cpu", (2,))
    shapes = [(8, 6), (6, 8), (8,)]
    params: list[Any] = [nn.Parameter(distribute_tensor(values(s, 1), mesh, [Shard(0)])) for s in shapes]
    optimizer = optim.Muon(params, fallback={})
    before = [param.to_local().clone() for param in params]
    _set_grads(params)
    if dist.get_rank() == 1:
        params[0].grad = params[1].grad = None
    with pytest.raises(ValueError, match="rank 1 steps 0 matrices"):
        optimizer.step()
    assert all(torch.equal(param.to_local(), old) for param, old in zip(params, before, strict=True))
    _set_grads(params)
    optimizer.step()
    assert not any(torch.equal(param.to_local(), old) for param, old in zip(params, before, strict=True))


@run_on(2)
def test_a_copy_has_no_process_group_and_takes_the_same_steps() -> None:
    params = parameters([(8, 6), (6, 8)])
    optimizer = optim.Muon(params, process_group=dist.new_group([0, 1]))
    train(params, optimizer)
    copied = copy.deepcopy(optimizer)
    mine = copied.param_groups[0]["params"]
    own = train(mine, copied)
    train(params, optimizer)
    expect_equal(params, optimizer, mine, copied)
    assert own == 2 * 5  # two matrices, each in five iterations
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    assert "process_group" not in optimizer.param_groups[0]


@run_on(2)
def test_process_groups_that_cannot_be_used() -> None:
    params = parameters([(8, 6)])
    with pytest.raises(TypeError, match="process_group is a str, expected a process group"):
        optim.Muon(params, process_group="gloo")  # type: ignore[arg-type]
    optim.Muon([{"params": []}], process_group=dist.group.WORLD).step()
    optimizer = optim.Muon(params, process_group=(group := dist.new_group([0, 1])))
    dist.barrier(group)  # a rank that leaves while another still connects fails it
    dist.destroy_process_group(group)
    _set_grads(params)
    with pytest.raises(ValueError, match="process_group was destroyed"):
        optimizer.step()
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process_group does not contain this rank"):
            optim.Muon(params, process_group=group)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_heads_are_matrices_of_their_own(is_transposed: bool, adjust_lr_fn: str | None) -> None:
    fused = values((96, 40), 0)

    def placed(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if is_transposed else tensor.contiguous()

    fused = placed(fused).requires_grad_()
    parts = [placed(part).requires_grad_() for part in fused.detach().split(24)]
    ours = optim.Muon([{"params": [fused], "num_heads": 4}], adjust_lr_fn=adjust_lr_fn)
    theirs = optim.Muon(parts, adjust_lr_fn=adjust_lr_fn)
    for step in range(3):
        grad = values((96, 40), 10 + step)
        fused.grad = torch.empty_like(fused).copy_(grad)
        for part, rows in zip(parts, grad.split(24), strict=True):
            part.grad = placed(rows).clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("heads", "what"),
    [(0, "an integer of 1 or more"), (2.0, "an integer of 1 or more"), (5, "has 96 rows: expected a")],
)
def test_heads_that_do_not_divide_the_rows_raise(heads: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"num_heads is {heads}.*{what}"):
        optim.Muon([{"params": [values((96, 40), 0)], "num_heads": heads}])


def test_heads_that_change_later_are_checked_before_the_step() -> None:
    params = parameters([(9, 6), (8, 6)])
    optimizer = optim.Muon(params)
    before = copy.deepcopy(params)
    _set_grads(params)
    optimizer.param_groups[0]["num_heads"] = 4
    with pytest.raises(ValueError, match="num_heads is 4, but a matrix of its group has 9 rows and 6 columns"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.fixture
def installed() -> Iterator[None]:
    drivetrain.install(optim=True)
    yield
    drivetrain.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"num_heads": 4}, {"beta2": 0.9}, {"ns_coefficients": "polar_express"}])
def test_torchs_class_takes_no_steps_with_options_that_it_lacks(options: dict[str, Any]) -> None:
    class Sub(torch.optim.Muon):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    with pytest.raises(NotImplementedError, match="_init_group"):
        Sub([{"params": parameters([(8, 6)]), **options}], max_grad_norm=1.0).step()  # type: ignore[call-arg]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("own", [{"num_heads": 4}, {"num_heads": "none"}, {"beta2": 2.0}, {"fallback": True}])
def test_a_script_keeps_entries_of_its_own_in_groups(own: dict[str, Any]) -> None:
    """Its hooks read them, and torch's class does not."""
    results = []
    for entries in ({}, own):
        params = parameters([(8, 6)])
        optimizer = torch.optim.Muon([{"params": params, **entries}])
        train(params, optimizer)
        assert all(optimizer.param_groups[0][name] == value for name, value in entries.items())
        results.append(params[0].detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (64, 64)])
def test_polar_express_brings_singular_values_close_to_one(shape: tuple[int, int]) -> None:
    """Against the polar factor, and closer to it than torch's coefficients in as many iterations."""
    u, s, v = torch.linalg.svd(values(shape, 3), full_matrices=False)
    gradient = u @ torch.diag(torch.logspace(0, -2, len(s))) @ v
    errors = []
    for coefficients in ((3.4445, -4.775, 2.0315), "polar_express"):
        param = torch.zeros(shape, requires_grad=True)
        param.grad = gradient
        options: Any = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "ns_steps": 8}
        optim.Muon([param], lr=1.0, ns_coefficients=coefficients, **options).step()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        errors.append((-param.detach() / scale - u @ v).norm() / len(s) ** 0.5)
    assert errors[1] < 0.05
    assert errors[0] > 4 * errors[1]


def test_other_names_of_coefficients_raise() -> None:
    with pytest.raises(ValueError, match=r"ns_coefficients is 'polar'. Coefficients must be .* or 'polar_express'"):
        optim.Muon([values((4, 4), 0)], ns_coefficients="polar")
