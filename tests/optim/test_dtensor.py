"""Tests steps of DTensors (FSDP2, tensor parallelism, HSDP) against torch's and against steps of whole tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import drivetrain
from drivetrain import optim
from drivetrain.amp import GradScaler
from effort import covering
from ranks import run_on

Run = Callable[..., list[Any]]

# Ranks have even, uneven or empty parts of these shapes, and one shape has a single element.
SHAPES = [(8, 6), (512, 3), (5, 3), (1,), (3, 2, 2), (16,)]
ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("NAdam", {"momentum_decay": 0.1}),
    ("ASGD", {"lambd": 0.1, "t0": 1.0}),
]  # torch's own Rprop steps no DTensors.


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def make(mesh: DeviceMesh, placements: list[Any], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(values(shape, seed, dtype), mesh, placements))
        for seed, shape in enumerate(SHAPES)
    ]


def set_grads(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Sets gradients whose whole tensors are equal for DTensors and for plain tensors."""
    for index, param in enumerate(params):
        grad = (factor * values(tuple(param.shape), 100 * step + index)).to(param.dtype)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        else:
            param.grad = grad


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(ours: list[Any], expected: list[Any]) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(whole(a).detach(), whole(b).detach(), rtol=0, atol=0)


def _placements(kind: str) -> tuple[DeviceMesh, list[Any]]:
    size = dist.get_world_size()
    if kind == "hsdp":
        return mesh_of(2, size // 2), [Replicate(), Shard(0)]
    if kind == "two":
        return mesh_of(2, size // 2), [Shard(0), Shard(0)]
    return mesh_of(size), [Shard(0) if kind == "shard" else Replicate()]


def _step_elementwise(name: str, options: dict[str, Any], kind: str) -> None:
    mesh, placements = _placements(kind)
    sharded = make(mesh, placements)
    plain = [nn.Parameter(values(shape, seed)) for seed, shape in enumerate(SHAPES)]
    theirs = make(mesh, placements)
    extra = [nn.Parameter(values((7,), 50)) for _ in range(2)]  # a plain tensor among DTensors
    ours = getattr(optim, name)([*sharded, extra[0]], lr=1e-2, **options)
    unsharded = getattr(optim, name)([*plain, extra[1]], lr=1e-2, **options)
    torchs = getattr(torch.optim, name)(theirs, lr=1e-2, **options)
    for step in range(3):
        set_grads([*sharded, extra[0]], step)
        set_grads([*plain, extra[1]], step)
        set_grads(theirs, step)
        for optimizer in (ours, unsharded, torchs):
            optimizer.step()
    assert_equal([*sharded, extra[0]], [*plain, extra[1]])
    for mine, torchs_param in zip(sharded, theirs, strict=True):
        torch.testing.assert_close(mine.full_tensor(), torchs_param.full_tensor())
        state, expected = ours.state[mine], torchs.state[torchs_param]
        assert state.keys() == expected.keys()
        for entry, value in state.items():
            assert type(value) is type(expected[entry]), entry
            if isinstance(value, DTensor):
                assert value.placements == mine.placements
                assert (value.shape, value.stride()) == (mine.shape, mine.stride())
    # The optimizer does not keep the gradients of the last step.
    for param in sharded:
        param.grad = None
    before = [param.full_tensor().clone() for param in sharded]
    ours.step()
    assert_equal(sharded, before)


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE, ids=[name for name, _ in ELEMENTWISE])
@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_elementwise_rules_step_their_part_with_the_bits_of_the_whole(
    on_ranks: Run, name: str, options: dict[str, Any], kind: str
) -> None:
    on_ranks(_step_elementwise, name, options, kind)


@pytest.mark.parametrize("kind", ["hsdp", "two", "shard"])
def test_elementwise_rules_on_four_ranks(on_four_ranks: Run, kind: str) -> None:
    on_four_ranks(_step_elementwise, *ELEMENTWISE[0], kind)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master_bits": 32, "state_bits": 16},
        {"master_bits": 24, "state_bits": 32},
        {"rounding": "kahan"},
        # Each of two ranks has three blocks of 256 from the shape (512, 3).
        {"master_bits": 24, "state_bits": 8, "min_8bit_size": 700},
    ],
    ids=["plain", "remainder16", "remainder8", "kahan", "codes"],
)
@run_on(2)
def test_storages_follow_the_part(options: dict[str, Any]) -> None:
    mesh = mesh_of(2)
    sharded = make(mesh, [Shard(0)], torch.bfloat16)
    plain = [nn.Parameter(values(shape, seed, torch.bfloat16)) for seed, shape in enumerate(SHAPES)]
    ours = optim.AdamW(sharded, lr=1e-2, **options)
    unsharded = optim.AdamW(plain, lr=1e-2, **options)
    for step in range(3):
        set_grads(sharded, step)
        set_grads(plain, step)
        ours.step()
        unsharded.step()
    assert_equal(sharded, plain)
    assert_equal([ours.float32_value(param) for param in sharded], [unsharded.float32_value(param) for param in plain])
    for param in sharded:
        for name, value in ours.state[param].items():
            assert isinstance(value, DTensor) == (name != "step" and not name.endswith(("codes", "scales"))), name
    report = ours.report()
    assert report.num_elements == sum(param.to_local().numel() for param in sharded)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(inputs)))
        return result


class Deep(Net):
    """A model whose peak a plan can halve. That of Net is one tensor, which backward needs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(48, 48), nn.ReLU())))


def _net(mesh: DeviceMesh | None = None, kind: type[nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    net = kind()
    if mesh is not None:
        fully_shard(net.first, mesh=mesh, **options)
        fully_shard(net, mesh=mesh, **options)
    return net


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        net(values((4, 64), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _go_on(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains two steps more. Returns the parameters after them, and what was there before them."""
    state = get_optimizer_state_dict(net, optimizer)["state"]
    before = {name: whole(param).detach().clone() for name, param in net.named_parameters()}
    before.update(
        {f"{name} exp_avg": whole(state[name]["exp_avg"]).clone() for name in before if "exp_avg" in state[name]}
    )
    _train(net, optimizer, range(3, 5))
    return [whole(param).detach() for param in net.parameters()], before


def _save(folder: str, rule: str, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    net = _net(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(optim, rule)(net.parameters(), lr=1e-2, **options)
    _train(net, optimizer, range(3))
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return _go_on(net, optimizer)


def _load(folder: str, rule: str, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    net = _net(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(optim, rule)(net.parameters(), lr=1e-2, **options)
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])
    return _go_on(net, optimizer)


@pytest.mark.parametrize(
    "options",
    [{}, {"state_bits": 8, "min_8bit_size": 1}, {"state_bits": 4, "min_8bit_size": 1}],
    ids=["plain", "codes", "4-bit codes"],
)
def test_checkpoint_of_two_ranks_goes_on_at_two_and_at_four(
    on_ranks: Run, on_four_ranks: Run, tmp_path: Any, options: dict[str, Any]
) -> None:
    params, moments = on_ranks(_save, str(tmp_path / "saved"), "AdamW", options)[0]
    again, loaded = on_ranks(_load, str(tmp_path / "saved"), "AdamW", options)[0]
    assert_equal([loaded[name] for name in moments], list(moments.values()))
    for a, b in zip(again, params, strict=True):  # Only the scales of 8-bit states may differ.
        torch.testing.assert_close(a, b, rtol=1e-6 if options else 0.0, atol=1e-7 if options else 0.0)
    elsewhere, loaded = on_four_ranks(_load, str(tmp_path / "saved"), "AdamW", options)[0]
    assert_equal([loaded[name] for name in moments], list(moments.values()))
    tolerance = {"rtol": 0.0, "atol": 2e-3} if options else {}  # Other blocks have other scales.
    for a, b in zip(elsewhere, params, strict=True):
        torch.testing.assert_close(a, b, **tolerance)  # type: ignore[arg-type]


def _norms(kind: str, factor: float) -> None:
    mesh, placements = _placements(kind)
    sharded = make(mesh, placements)
    plain = [nn.Parameter(values(shape, seed)) for seed, shape in enumerate(SHAPES)]
    extra = [nn.Parameter(values((7,), 50)) for _ in range(2)]
    ours = optim.AdamW([*sharded, extra[0]], max_grad_norm=1.0)
    unsharded = optim.AdamW([*plain, extra[1]], max_grad_norm=1.0)
    for step in range(2):
        set_grads([*sharded, extra[0]], step, factor)
        set_grads([*plain, extra[1]], step, factor)
        grads = [param.grad for param in [*plain, extra[1]] if param.grad is not None]
        expected = torch.nn.utils.get_total_norm(grads).item()
        ours.step()
        unsharded.step()
        assert ours.grad_norm == pytest.approx(expected, rel=1e-6)
        for a, b in zip([*sharded, extra[0]], [*plain, extra[1]], strict=True):
            torch.testing.assert_close(whole(a), b, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-6, atol=1e-7)  # `.grad` is clipped.
    before = [whole(param).detach().clone() for param in sharded]
    set_grads([*sharded, extra[0]], 0)
    if dist.get_rank() % 2 == 1:  # The parts of odd ranks overflow, in all their copies.
        sharded[1].grad.to_local()[0] = float("inf")  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="the step was left out"):
        ours.step()
    assert ours.last_step_skipped
    assert_equal(sharded, before)


@pytest.mark.parametrize("factor", [1e-4, 1.0])
def test_norm_counts_every_distinct_part_once(on_ranks: Run, factor: float) -> None:
    on_ranks(_norms, "shard", factor)


@pytest.mark.parametrize("kind", ["hsdp", "two"])
def test_norm_on_meshes_of_two_dimensions(on_four_ranks: Run, kind: str) -> None:
    on_four_ranks(_norms, kind, 1.0)


def _clip_grad_norm(kind: str, max_norm: float) -> None:
    mesh, placements = _placements(kind)
    params, theirs = make(mesh, placements), make(mesh, placements)
    set_grads(params, 0)
    set_grads(theirs, 0)
    versions = [param.grad._version for param in params if param.grad is not None]
    norm = drivetrain.clip_grad_norm_(params, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert isinstance(norm, DTensor)
    assert isinstance(expected, DTensor)
    torch.testing.assert_close(norm.full_tensor(), expected.full_tensor())
    assert norm.item() == norm.full_tensor().item()
    for a, b in zip(params, theirs, strict=True):
        torch.testing.assert_close(whole(a.grad), whole(b.grad))
    clipped = [param.grad._version for param in params if param.grad is not None]
    assert all((new > old) == (max_norm < 10) for new, old in zip(clipped, versions, strict=True))
    set_grads(params, 0)
    if dist.get_rank() % 2 == 0:
        params[0].grad.to_local()[0] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="non-finite"):
        drivetrain.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm(on_ranks: Run, max_norm: float) -> None:
    on_ranks(_clip_grad_norm, "shard", max_norm)


def test_clip_grad_norm_with_replicas(on_four_ranks: Run) -> None:
    on_four_ranks(_clip_grad_norm, "hsdp", 0.5)


@run_on(2)
def test_gradients_that_are_partial_sums_are_reduced() -> None:
    mesh = mesh_of(2)
    for placement in (Replicate(), Shard(0)):
        param = nn.Parameter(distribute_tensor(values((4, 3), 0), mesh, [placement]))
        reference = nn.Parameter(values((4, 3), 0))
        local = values((4, 3), 1) * (dist.get_rank() + 1)
        param.grad = DTensor.from_local(local, mesh, [Partial()])
        reference.grad = values((4, 3), 1) * 3
        for one in (param, reference):
            optimizer = optim.AdamW([one], lr=0.1, max_grad_norm=1.0)
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(3 * values((4, 3), 1).norm().item(), rel=1e-6)
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == (placement,)
        torch.testing.assert_close(whole(param), reference.data)
        param.grad = DTensor.from_local(local, mesh, [Partial()])
        norm = drivetrain.clip_grad_norm_([param], 1.0)
        assert norm.item() == pytest.approx(3 * values((4, 3), 1).norm().item(), rel=1e-6)


@run_on(2)
def test_an_overflow_in_one_part_leaves_the_step_out_everywhere() -> None:
    params = make(mesh_of(2), [Shard(0)])
    optimizer = optim.AdamW(params)
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)):
        set_grads(params, 1)
        scaler.scale(torch.ones(()))
        if dist.get_rank() == 0:
            params[1].grad.to_local()[0] = float("inf")  # type: ignore[union-attr]
        before = [whole(param).detach().clone() for param in params]
        scaler.step(optimizer)
        scaler.update()
        assert_equal(params, before)
        assert scaler.get_scale() == 4.0  # The rank with a finite part backs off, too.


@run_on(2)
def test_a_cast_between_steps_is_refused() -> None:
    params = make(mesh_of(2), [Shard(0)])
    module = nn.ParameterList(params)
    optimizer = optim.AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    optimizer.zero_grad()
    module.bfloat16()
    cast = list(module)
    assert all(a is b for a, b in zip(cast, params, strict=True))
    set_grads(params, 1)
    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"parameter 0 .* is torch.bfloat16 but was torch.float32 in the step before"
        ):
            optimizer.step()


@run_on(2)
def test_what_is_not_supported_is_refused_at_construction() -> None:
    mesh = mesh_of(2)
    split = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    low = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]))  # One rank has no row.
    for name, param in (("Muon", split), ("Adafactor", low)):
        with pytest.raises(
            NotImplementedError,
            match=r"parameter 'w' is a DTensor with placements .*gathers for its step, and state_bits=8",
        ):
            getattr(optim, name)([("w", param)], state_bits=8)
    partial = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(NotImplementedError, match=r"parameter 0 of param_groups\[0\].*redistribute it"):
        optim.AdamW([partial])
    optimizer = optim.AdamW([("w", split)])
    module = nn.Module()
    module.w = split
    with pytest.raises(NotImplementedError, match="step_in_backward"):
        optimizer.step_in_backward(module)
    split.grad = None
    optimizer.step()
    split.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = partial
    partial.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="parameter 'w' is a DTensor"):
        optimizer.step()


@run_on(2)
def test_installed_classes_stay_torchs_where_ours_cannot_step() -> None:
    # The names of this module are torch's classes, wherever install() finds them.
    torchs = torch.optim.SGD
    mesh = mesh_of(2)
    drivetrain.install(optim=True)
    try:
        params = make(mesh, [Shard(0)])
        partial = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
        reference = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
        with pytest.warns(UserWarning, match="torch.optim.SGD stays torch's own class: parameter 0 of.*placements"):
            optimizer = torch.optim.SGD(param for param in [partial])
        assert type(optimizer) is torchs
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for param, sgd in ((partial, optimizer), (reference, torchs([reference]))):
            param.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
            sgd.step()
        assert_equal([partial], [reference])
        assert calls == [1]
        assert type(torch.optim.Adafactor(params)) is optim.Adafactor
        assert type(torch.optim.Muon(params[:2])) is optim.Muon
        mixed = [*params, partial], [*make(mesh, [Shard(0)]), reference]
        with pytest.warns(UserWarning, match="torch.optim.SGD stays torch's own class: parameter 6 of.*placements"):
            made = torch.optim.SGD(mixed[0], lr=0.1, momentum=0.9), torchs(mixed[1], lr=0.1, momentum=0.9)
        assert type(made[0]) is torchs
        for step in range(3):
            for stepped, sgd in zip(mixed, made, strict=True):
                set_grads(stepped[:-1], step)
                stepped[-1].grad = DTensor.from_local(torch.full((4, 4), 1.0 + step), mesh, [Partial()])
                sgd.step()
            assert_equal([partial], [reference])
        for a, b in zip(*mixed, strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        assert [*made[0].state_dict()["state"]] == [*range(len(mixed[0]))]
    finally:
        drivetrain.uninstall()
    with pytest.raises(NotImplementedError, match="placements"):
        optim.SGD([partial])


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LAMB"])
@run_on(2)
def test_rules_of_whole_parameters_step_replicated_ones(name: str) -> None:
    shapes = [(8, 6), (6, 8)] if name == "Muon" else SHAPES
    mesh = mesh_of(2)
    replicated = [nn.Parameter(distribute_tensor(values(s, i), mesh, [Replicate()])) for i, s in enumerate(shapes)]
    plain = [nn.Parameter(values(s, i)) for i, s in enumerate(shapes)]
    for step in range(2):
        for params in (replicated, plain):
            set_grads(params, step)
            getattr(optim, name)(params, lr=0.1).step()
    assert_equal(replicated, plain)


@run_on(2)
def test_muons_fallback_steps_parts() -> None:
    """AdamW's groups are stepped in parts, so that they may have storage formats, and matrices are gathered."""
    mesh = mesh_of(2)
    sharded = make(mesh, [Shard(0)])
    plain = [nn.Parameter(values(shape, seed)) for seed, shape in enumerate(SHAPES)]
    made = [
        optim.Muon(
            [{"params": params[1:]}, {"params": params[:1], "fallback": True}],
            lr=1e-2,
            fallback={"lr": 1e-3, "state_bits": 16},
        )
        for params in (sharded, plain)
    ]
    for step in range(3):
        for params, optimizer in zip((sharded, plain), made, strict=True):
            set_grads(params, step)
            optimizer.step()
    assert_equal(sharded, plain)
    assert made[0].state[sharded[0]]["exp_avg"].dtype == torch.bfloat16
    assert [group["fallback"] for group in made[0].param_groups] == [False, True, True]


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.float32), ({"master_bits": 32, "state_bits": 32}, torch.bfloat16)]
)
@run_on(2)
def test_schedule_free_adamw_moves_parts(options: dict[str, Any], dtype: torch.dtype) -> None:
    mesh = mesh_of(2)
    sharded = make(mesh, [Shard(0)], dtype)
    plain = [nn.Parameter(values(shape, seed, dtype)) for seed, shape in enumerate(SHAPES)]
    made = [optim.AdamWScheduleFree(params, lr=0.05, **options) for params in (sharded, plain)]
    for step in range(4):
        for params, optimizer in zip((sharded, plain), made, strict=True):
            set_grads(params, step)
            optimizer.step()
    at_y = [whole(param).detach().clone() for param in sharded]
    assert_equal(sharded, plain)
    for optimizer in made:
        optimizer.eval()
    assert_equal(sharded, plain)
    assert any(not torch.equal(whole(param), y) for param, y in zip(sharded, at_y, strict=True))
    for optimizer in made:
        optimizer.train()
    assert_equal(sharded, plain)


# Some matrices take several units of Adafactor's sums, some have uneven parts, and some leave ranks without a row.
SUMMED = [(600, 300), (8, 6), (5, 3), (1, 4), (1,), (3, 6, 4), (16,)]


RULES = (("LAMB", {"weight_decay": 0.1}), ("Adafactor", {"weight_decay": 0.1}), ("Muon", {}))


def _summed_rules(cases: list[Any]) -> None:
    """Compares rules that sum over whole parameters, on parts, with steps of whole parameters and with torch's."""
    for (name, options), placements, sizes in cases:
        mesh = mesh_of(*sizes)
        shapes = [s for s in SUMMED if all(getattr(p, "dim", 0) < len(s) for p in placements)]
        if name == "Muon":
            shapes = [s for s in shapes if len(s) == 2 and max(s) < 100]

        def parameters(shapes: list[tuple[int, ...]] = shapes) -> list[nn.Parameter]:
            return [nn.Parameter(values(shape, seed)) for seed, shape in enumerate(shapes)]

        sharded = [nn.Parameter(distribute_tensor(p.data, mesh, placements)) for p in parameters()]
        plain, theirs = parameters(), parameters()
        groups = [{"params": sharded[1:]}, {"params": sharded[:1], "lr": 3e-3}]
        ours = getattr(optim, name)(groups, lr=1e-2, max_grad_norm=2.0, **options)
        whole_groups = [{"params": plain[1:]}, {"params": plain[:1], "lr": 3e-3}]
        unsharded = getattr(optim, name)(whole_groups, lr=1e-2, max_grad_norm=2.0, **options)
        their_groups = [{"params": theirs[1:]}, {"params": theirs[:1], "lr": 3e-3}]
        torchs = None if name == "LAMB" else getattr(torch.optim, name)(their_groups, lr=1e-2, **options)
        for step in range(3):
            for params in (sharded, plain, theirs):
                set_grads(params, step)
            torch.nn.utils.clip_grad_norm_(theirs, 2.0)
            for optimizer in (ours, unsharded, torchs):
                if optimizer is not None:
                    optimizer.step()
        for mine, param, their in zip(sharded, plain, theirs, strict=True):
            where = f"{name}, {tuple(param.shape)}, {placements}"
            tolerance = {"rtol": 1e-5, "atol": 1e-6, "msg": lambda text, where=where: f"{where}: {text}"}
            torch.testing.assert_close(whole(mine).detach(), param.detach(), **tolerance)
            torch.testing.assert_close(whole(mine.grad), param.grad, **tolerance)
            if torchs is not None:
                rough = {"rtol": 1e-2, "atol": 1e-3} if name == "Muon" else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(whole(mine).detach(), their.detach(), **rough)
            for entry, value in unsharded.state[param].items():
                if entry == "step":
                    assert ours.state[mine][entry] == value
                    continue
                found = ours.state[mine][entry]
                assert isinstance(found, DTensor), where
                assert found.shape == value.shape, where
                torch.testing.assert_close(whole(found), value, **tolerance)
                for dim, place in enumerate(found.placements):  # Replicated states are equal.
                    if isinstance(place, Replicate):
                        local = found.to_local().clone()
                        dist.broadcast(local, dist.get_global_rank(mesh.get_group(dim), 0), mesh.get_group(dim))
                        torch.testing.assert_close(found.to_local(), local, rtol=0, atol=0)
        before = [whole(param).detach().clone() for param in sharded]
        set_grads(sharded, 0)
        if dist.get_rank() % 2 == 0:  # All copies of a part overflow.
            sharded[1].grad.to_local().fill_(float("inf"))  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="the step was left out"):
            ours.step()
        assert_equal(sharded, before)


def test_rules_that_add_up_over_parameters_step_parts(on_ranks: Run) -> None:
    on_ranks(_summed_rules, covering(2, RULES, [[Shard(0)], [Shard(1)]], [(2,)]))


def test_rules_that_add_up_over_parameters_on_four_ranks(on_four_ranks: Run) -> None:
    layouts = [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]]
    on_four_ranks(_summed_rules, covering(1, RULES, layouts, [(2, 2)]))


@pytest.mark.parametrize("name", ["LAMB", "Adafactor"])
def test_checkpoint_of_sums_goes_on_at_four_ranks(on_ranks: Run, on_four_ranks: Run, tmp_path: Any, name: str) -> None:
    expected, _ = on_ranks(_save, str(tmp_path / "saved"), name, {})[0]
    params, _ = on_four_ranks(_load, str(tmp_path / "saved"), name, {})[0]
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@run_on(2)
def test_a_loaded_state_dict_has_the_same_8_bits() -> None:
    params = make(mesh_of(2), [Shard(0)])
    optimizer = optim.AdamW(params, state_bits=8, min_8bit_size=1)
    set_grads(params, 0)
    optimizer.step()
    clones = copy.deepcopy(params)
    reference = optim.AdamW(clones, state_bits=8, min_8bit_size=1)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (params, clones):
        set_grads(one, 1)
    optimizer.step()
    reference.step()
    for a, b in zip(clones, params, strict=True):
        torch.testing.assert_close(whole(a), whole(b), rtol=1e-6, atol=1e-7)
        for entry, codes in optimizer.state[b].items():
            if entry.endswith("_codes"):
                assert torch.equal(codes, reference.state[a][entry])
    saved = optimizer.torch_state_dict()
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in saved["state"].values())


@run_on(2)
def test_what_has_no_meaning_under_fully_shard_is_refused() -> None:
    mesh = mesh_of(2)
    net = _net(mesh)
    optimizer = optim.AdamW(net.parameters())
    with pytest.raises(NotImplementedError, match=r"set_requires_gradient_sync\(\)"):
        drivetrain.accumulate(net, optimizer, steps=2)
    with pytest.raises(NotImplementedError, match=r"step_in_backward\(\) does not support sharded models"):
        optimizer.step_in_backward(net)
    halves = _net(mesh).bfloat16()
    with pytest.raises(
        NotImplementedError, match=r"parameter 'first\.weight' is a DTensor.*reduce_dtype=torch.float32"
    ):
        drivetrain.main_grads(halves)
    halves(values((4, 64), 0, torch.bfloat16)).sum().backward()  # The refusal left nothing behind.


@run_on(2)
def test_checkpoint_gathers_resharded_parameters_again() -> None:
    mesh = mesh_of(2)
    plain, checkpointed = _net(mesh), _net(mesh)
    inputs = values((4, 64), dist.get_rank())
    plain(inputs).square().sum().backward()

    class Block(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = drivetrain.checkpoint(self.module, x)
            return result

    checkpointed.first = Block(checkpointed.first)
    checkpointed(inputs).square().sum().backward()
    assert_equal([p.grad for p in checkpointed.parameters()], [p.grad for p in plain.parameters()])


@run_on(2)
def test_activation_budget_works_without_resharding_and_refuses_it() -> None:
    mesh = mesh_of(2)
    inputs = values((256, 64), dist.get_rank())

    def step(net: nn.Module) -> None:
        net.zero_grad()
        net(inputs).square().sum().backward()

    resharded = _net(mesh, Deep)
    with pytest.raises(NotImplementedError, match=r"module 'first' .*reshard_after_forward=False"):
        drivetrain.activation_budget(resharded, lambda: step(resharded), "60%")
    step(resharded)
    with pytest.raises(NotImplementedError, match=r"module 'first' .*reshard_after_forward=False"):
        drivetrain.activation_budget(resharded, lambda: step(resharded), "60%")
    told = _net(mesh, Deep, reshard_after_forward=True)
    with pytest.raises(NotImplementedError, match=r"the model .*reshard_after_forward=False"):
        drivetrain.activation_budget(told, lambda: step(told), "60%")
    kept = _net(mesh, Deep, reshard_after_forward=False)
    plan = drivetrain.activation_budget(kept, lambda: step(kept), "60%")
    for net in (kept, resharded):
        step(net)
    assert plan.measured_bytes is not None
    assert plan.measured_bytes < plan.unplanned_bytes
    assert_equal([p.grad for p in kept.parameters()], [p.grad for p in resharded.parameters()])


@run_on(4)
def test_fully_shard_over_a_tensor_parallel_plan() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}

    def make_net() -> nn.Module:
        net = parallelize_module(_net(), mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
        return net

    ours, theirs = make_net(), make_net()
    optimizer = optim.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(3):
        inputs = values((4, 64), 10 * step + mesh.get_local_rank("dp"))
        for net in (ours, theirs):
            net.zero_grad()
            net(inputs).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        assert isinstance(expected, DTensor)
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(expected.full_tensor().item(), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b))
        state = optimizer.state[a]["exp_avg"]
        assert (state.placements, state.shape) == (a.placements, a.shape)  # type: ignore[attr-defined]
        torch.testing.assert_close(whole(state), whole(reference.state[b]["exp_avg"]))


# ---- FSDP1, whose parts are plain tensors.


@pytest.mark.parametrize("uses_original", [False, True])
@run_on(2)
def test_norms_of_fsdp1s_parts_are_refused(uses_original: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=uses_original, device_id=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="would clip by the norm of its own part"):
        optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with pytest.raises(NotImplementedError, match="LAMB needs whole parameters"):
        optim.LAMB(model.parameters())
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert model.clip_grad_norm_(0.1) > 0.1
    optimizer.step()
