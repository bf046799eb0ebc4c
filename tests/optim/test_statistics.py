"""Tests what a step measures against the same figures computed in Python, and the bits of steps that measure."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import drivetrain
from drivetrain import _C, optim
from drivetrain.optim.base import FusedOptimizer
from drivetrain.optim.precision import SCALAR_NAMES
from drivetrain.optim.statistics import ParameterStatistics
from optim_cases import CASES, cases, copies, each_rule, make_params, set_grads
from precision_cases import PRECISIONS, everything, same_bits
from ranks import run_on

Make = Callable[..., FusedOptimizer]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# No elements, one, a vector's rest, a tile and a chunk with their neighbors, and several chunks.
SHAPES: list[Any] = [(0,), (), (1,), (17,), (511,), (513,), (4096,), (4097,), (3, 700), (30, 700)]
NAMES = [f"param_groups[0] {index}" for index in range(len(SHAPES))]


def figures(one: ParameterStatistics) -> tuple[Any, ...]:
    return tuple(vars(one).values())


def exact_values(optimizer: FusedOptimizer, param: Tensor) -> Tensor:
    """Returns what a step computes for a parameter before it rounds it, from a step of float32 or float64 copies."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    alone = param.detach().to(dtype, copy=True).requires_grad_()
    assert param.grad is not None
    alone.grad = param.grad.to(dtype)
    options = {name: value for name, value in optimizer.param_groups[0].items() if not name.startswith("param")}
    twin = type(optimizer)([alone], lr=options["lr"])
    twin.param_groups[0].update(options)
    state = optimizer.float32_state(param)
    twin.state[alone] = {
        name: value.clone() if name in SCALAR_NAMES else value.to(dtype, copy=True) for name, value in state.items()
    }
    twin.step()
    return alone.detach()


def expected(optimizer: FusedOptimizer, param: Tensor, exact: Tensor, before: Tensor, grad: Tensor) -> tuple[Any, ...]:
    stored = param.detach()
    changed = exact != before.to(exact.dtype)
    is_half = stored.dtype.itemsize == 2
    return (
        grad.double().norm().item(),
        (exact - before.to(exact.dtype)).double().norm().item(),
        before.double().norm().item(),
        grad.double().abs().max().item(),
        0,
        changed.sum().item() if is_half else 0,
        (changed & (stored == before)).sum().item() if is_half else 0,
    )


def check_figures(params: list[Tensor], optimizer: FusedOptimizer) -> None:
    set_grads(params)
    optimizer.step()  # a twin of the first step would not round the states that it begins with
    statistics = optimizer.statistics(every=1)
    for step in range(2):
        set_grads(params)
        before = [param.detach().clone() for param in params]
        exact = [exact_values(optimizer, param) for param in params]
        optimizer.step()
        assert statistics.latest is not None
        assert statistics.latest.step == step + 1
        assert list(statistics.latest.parameters) == NAMES[1:]
        for name, *rest in list(zip(NAMES, params, exact, before, strict=True))[1:]:
            param, of_param, was = rest
            assert param.grad is not None
            found = statistics.latest.parameters[name]
            torch.testing.assert_close(
                figures(found), expected(optimizer, param, of_param, was, param.grad), rtol=1e-6, atol=1e-30
            )


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_figures_are_those_computed_in_python(case: str, dtype: torch.dtype) -> None:
    ours, _, options = CASES[case]
    params = make_params(dtype, SHAPES)
    check_figures(params, ours(params, **options))


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:])
@pytest.mark.parametrize("state_bits", [4, 8, "fp8", 16])
def test_figures_of_formats_of_states(isa: str, state_bits: Any, dtype: torch.dtype) -> None:
    """Blocks of codes have a loop of their own, and so do their rests."""
    params = make_params(dtype, SHAPES)
    check_figures(params, optim.AdamW(params, state_bits=state_bits, min_8bit_size=1))


@pytest.mark.parametrize(("case", "precision"), each_rule(("plain", *PRECISIONS)))
def test_bits_of_parameters_and_figures(case: str, precision: str) -> None:
    """Statistics change no bits, and depend on neither instruction set nor number of threads."""
    ours, _, options = CASES[case]
    dtype = torch.float32 if precision.startswith("state") else torch.bfloat16
    start = make_params(dtype, [*SHAPES, (70_000,)])
    options = options | PRECISIONS.get(precision, {}) | {"min_8bit_size": 1}
    found = []
    for isa, threads, measures in [(isa, n, n != 2) for isa in _C.available_isas() for n in (1, 2, 3)]:
        _C.force_isa(isa)
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        params = copies(start)
        optimizer = ours(params, **options)
        statistics = optimizer.statistics(every=1) if measures else None
        for _ in range(2):
            set_grads(params)
            optimizer.step()
        latest = None if statistics is None else statistics.latest
        found.append((everything(optimizer), latest))
    values, latest = found[0]
    assert latest is not None
    for others, theirs in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(values, others, strict=True))
        assert theirs is None or repr(theirs.parameters) == repr(latest.parameters)


def loop(optimizer: FusedOptimizer, params: list[Tensor], grad: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.step()


def test_measures_every_so_many_steps() -> None:
    params = make_params()
    optimizer = optim.SGD(params, lr=0.1)
    loop(optimizer, params)
    with optimizer.statistics(every=3) as statistics:
        assert statistics.latest is None
        assert "nothing measured" in repr(statistics)
        steps = []
        for _ in range(7):
            loop(optimizer, params)
            assert statistics.latest is not None
            steps.append(statistics.latest.step)
        assert steps == [1, 1, 1, 4, 4, 4, 7]
    loop(optimizer, params)
    assert statistics.latest.step == 7
    second = optimizer.statistics()
    statistics.remove()  # the first one, which has ended already
    assert second.is_due
    optimizer.step(lambda: 0.0)
    assert second.latest is not None
    assert not second.is_due


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_lost_to_rounding(dtype: torch.dtype) -> None:
    half = torch.finfo(dtype).eps / 2  # half the distance of values between 1 and 2
    grad = torch.cat([torch.full((300,), 0.9 * half), torch.full((200,), 1.5 * half), torch.zeros(500)]).to(dtype)
    for options, share in (
        ({}, 0.6),
        ({"rounding": "kahan"}, 0),
        ({"rounding": "stochastic"}, 0),
        ({"master_bits": 32}, 0),
    ):
        param = torch.full((1000,), 1.5, dtype=dtype).requires_grad_()
        param.grad = grad
        optimizer = optim.SGD([("weight", param)], lr=1.0, **options)
        statistics = optimizer.statistics()
        optimizer.step()
        assert statistics.latest is not None
        assert statistics.latest.parameters["weight"].lost_updates == share
        assert ("'weight' 60%" in str(statistics)) == bool(share)
        assert bool(statistics.latest.advice()) == bool(share)


def test_masters_have_norms_of_their_own_bits() -> None:
    param = torch.ones(100).bfloat16().requires_grad_()
    optimizer = optim.SGD([param], lr=1.0, master_bits=32)
    statistics = optimizer.statistics(every=1)
    for expected in (1.0, 1 - 2**-12):
        loop(optimizer, [param], 2**-12)
        assert statistics.latest is not None
        assert statistics.latest.of().param_norm == pytest.approx(10 * expected, rel=1e-9)
        assert statistics.latest.of().relative_update == pytest.approx(2**-12 / expected, rel=1e-9)


def test_clipped_and_scaled_gradients() -> None:
    """Gradients' figures are unscaled and not clipped; all parameters together have the optimizer's norm."""
    params = make_params()
    optimizer = optim.SGD(params, lr=1.0, max_grad_norm=0.5, zero_grads_in_step=True)
    statistics = optimizer.statistics()
    set_grads(params)
    largest = max(param.grad.abs().max().item() for param in params if param.grad is not None and param.numel())
    for param in params:
        assert param.grad is not None
        param.grad *= 1024
    optimizer.grad_scale = 1024.0
    optimizer.step()
    assert statistics.latest is not None
    together = statistics.latest.of()
    assert together.grad_norm == pytest.approx(optimizer.grad_norm, rel=1e-12)
    assert together.update_norm == pytest.approx(0.5, rel=1e-5)
    assert together.largest_grad == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, drivetrain.amp.GradScaler])
def test_a_skipped_step_measures_nothing(scaler: Any) -> None:
    params = make_params()
    optimizer = optim.AdamW(params)
    statistics = optimizer.statistics(every=2)
    scale = scaler("cpu", init_scale=4.0)
    for grad, measured in ((math.inf, None), (1.0, 1), (math.nan, 1), (1.0, 1), (1.0, 3)):
        scale.scale(torch.ones(()))
        for param in params:
            param.grad = torch.full_like(param, grad)
        scale.step(optimizer)
        scale.update()
        assert (statistics.latest and statistics.latest.step) == measured


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("state_bits", [None, 8])
def test_gradients_that_are_not_finite_are_counted(isa: str, dtype: torch.dtype, make: Make, state_bits: Any) -> None:
    """Finite neighbors count, in whole vectors and in the rest of a tile, and so do those in other tiles."""
    options = {} if state_bits is None or dtype == torch.float64 else {"state_bits": state_bits}
    param = torch.ones(5000, dtype=dtype).requires_grad_()
    for largest in (0, 699, 2000, 4998):
        param.grad = torch.full_like(param, -2.0)
        param.grad[largest] = 3.0
        param.grad[[2, 700, 4999]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
        optimizer = make([param], lr=0.1, **options)
        statistics = optimizer.statistics()
        optimizer.step()
        assert statistics.latest is not None
        found = statistics.latest.of()
        assert (found.num_not_finite, found.largest_grad, math.isfinite(found.grad_norm)) == (3, 3.0, False)
        assert "not finite" in statistics.latest.advice()[0]


class Layers(nn.Module):
    """Holds numbered layers between unnumbered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.h = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.h:
            x = layer(x).tanh()
        return x


def backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def test_names_patterns_and_depths() -> None:
    model = Layers()
    for optimizer in (optim.Adam(model.named_parameters()), optim.Adam(model.parameters())):
        backward(model, 0)
        with optimizer.statistics(model=model) as statistics:
            optimizer.step()
        latest = statistics.latest
        assert latest is not None
        assert list(latest.parameters) == [name for name, _ in model.named_parameters()]
        layer = [latest.parameters[f"h.1.{name}"] for name in ("weight", "bias")]
        assert latest.of("h.1.*") == latest.by_depth()[1]
        assert latest.of("h.1.*").grad_norm == pytest.approx(math.hypot(*(one.grad_norm for one in layer)))
        assert list(latest.by_depth()) == [0, 1]
        with pytest.raises(KeyError, match="no parameter"):
            latest.of("h.2.*")
        assert "h.1.weight" in str(latest)
        assert "h.1.weight" in latest._repr_html_()


@pytest.mark.parametrize("cap", [1e-6, 25.0])
def test_steps_in_backward_measure_the_same(cap: float) -> None:
    theirs = Layers()
    ours = copy.deepcopy(theirs)
    in_backward, after = (optim.AdamW(model.named_parameters()) for model in (ours, theirs))
    in_backward.step_in_backward(ours, bucket_cap_mb=cap)
    found = [optimizer.statistics(every=2) for optimizer in (in_backward, after)]
    for step in range(3):
        for model, optimizer in ((ours, in_backward), (theirs, after)):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        assert found[0].latest == found[1].latest
        assert found[0].latest is not None
        assert found[0].latest.step == (3 if step == 2 else 1)


def test_what_is_not_read_yet_can_be_copied() -> None:
    params = make_params()
    optimizer = optim.SGD(params, lr=0.1)
    statistics = optimizer.statistics()
    loop(optimizer, params)
    assert pickle.loads(pickle.dumps(statistics)).latest == statistics.latest


def test_copies_and_state_dicts_are_without_it() -> None:
    params = make_params()
    optimizer = optim.AdamW(params)
    before = optimizer.state_dict()["param_groups"]
    statistics = optimizer.statistics(every=1)
    loop(optimizer, params)
    assert optimizer.state_dict()["param_groups"] == before
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        loop(twin, twin.param_groups[0]["params"])
        twin.statistics()  # none is active
    optimizer.load_state_dict(optimizer.state_dict())
    loop(optimizer, params)
    assert statistics.latest is not None
    assert statistics.latest.step == 2


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.Adafactor, {}),
        (optim.LAMB, {}),
        (optim.Muon, {"lr": 0.02}),
        (optim.Muon, {"lr": 0.02, "fallback": {"lr": 1e-3}}),
    ],
    ids=["adafactor", "lamb", "muon", "muon with a fallback"],
)
def test_rules_of_several_passes(make: Make, options: dict[str, Any]) -> None:
    """The figures are those of the gradient and of the whole step, in any order of the matrices."""
    shapes: list[Any] = [(70, 100), (5, 7), (100, 70), (70, 100), (1, 5000)]
    params = make_params(shapes=[*shapes, (33,)] if "fallback" in options else shapes)
    unmeasured = copies(params)
    optimizers = [make(those, **options) for those in (params, unmeasured)]
    statistics = optimizers[0].statistics(every=1)
    for _ in range(2):
        set_grads(params, unmeasured)
        before = [param.detach().clone() for param in params]
        for optimizer in optimizers:
            optimizer.step()
        assert all(same_bits(a, b) for a, b in zip(params, unmeasured, strict=True))
        assert statistics.latest is not None
        in_groups = [param for group in optimizers[0].param_groups for param in group["params"]]
        for (_, found), param in zip(statistics.latest.parameters.items(), in_groups, strict=True):
            was = next(b for p, b in zip(params, before, strict=True) if p is param)
            assert param.grad is not None
            norms = (param.grad.norm().item(), (param.detach() - was).norm().item(), was.norm().item())
            torch.testing.assert_close((found.grad_norm, found.update_norm, found.param_norm), norms, rtol=1e-5, atol=0)
            assert found.largest_grad == param.grad.abs().max()


def test_sparse_gradients_are_left_out() -> None:
    table, dense = nn.Embedding(10, 4, sparse=True), nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([table.weight, dense], lr=0.1)
    statistics = optimizer.statistics()
    (table(torch.tensor([1, 2])) * dense).sum().backward()
    optimizer.step()
    assert statistics.latest is not None
    assert list(statistics.latest.parameters) == ["param_groups[0] 1"]


def test_errors() -> None:
    optimizer = optim.AdamW(make_params())
    for every in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="every is"):
            optimizer.statistics(every=every)  # type: ignore[arg-type]
    optimizer.statistics()
    with pytest.raises(RuntimeError, match="called before"):
        optimizer.statistics()
    on_meta = optim.SGD([nn.Parameter(torch.ones(2, device="meta"))], lr=0.1)
    with pytest.raises(NotImplementedError, match="on meta"):
        on_meta.statistics()


def test_torchs_own_steps_are_refused(installed: None) -> None:
    """A step that torch's class would take raises while statistics() is active, and the other way round."""
    memory = torch.ones(4)
    shared: list[Any] = [nn.Parameter(memory), nn.Parameter(memory)]
    for begins_first in (True, False):
        optimizer: Any = torch.optim.SGD(shared, lr=0.1)
        for param in shared:
            param.grad = torch.ones(4)
        if begins_first:
            optimizer.statistics()
            with pytest.raises(ValueError, match="share memory"):
                optimizer.step()
            assert torch.equal(memory, torch.ones(4))
            continue
        with pytest.warns(UserWarning, match="share memory"):
            optimizer.step()
        with pytest.raises(NotImplementedError, match="share memory"):
            optimizer.statistics()


@run_on(2)
def test_each_rank_measures_its_part_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(1.0, 5.0).view(4, 1).expand(4, 6).contiguous()
    for make in (optim.AdamW, optim.LAMB):
        param = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
        plain = nn.Parameter(torch.ones(3))
        param.grad = distribute_tensor(10 * values, mesh, [Shard(0)])
        plain.grad = torch.ones(3)
        optimizer = make([param, plain])
        statistics = optimizer.statistics()
        optimizer.step()
        assert statistics.latest is not None
        found = statistics.latest.parameters
        local = param.grad.full_tensor() if make is optim.LAMB else param.grad.to_local()
        assert list(found) == ["param_groups[0] 0", "param_groups[0] 1"]
        assert found["param_groups[0] 0"].grad_norm == pytest.approx(local.norm().item(), rel=1e-6)
        assert found["param_groups[0] 1"].grad_norm == pytest.approx(math.sqrt(3), rel=1e-6)


@run_on(2)
def test_each_rank_measures_its_rows() -> None:
    model, whole = Layers(), Layers()
    for name, tensor in model.named_parameters():
        torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(len(name)))
    whole.load_state_dict(model.state_dict())
    ddp = drivetrain.DistributedDataParallel(model, shard="optimizer")
    optimizer = optim.AdamW(model.named_parameters())
    statistics = optimizer.statistics()
    backward(ddp, 0)
    backward(whole, 0)
    optimizer.step()
    assert statistics.latest is not None
    found = statistics.latest.parameters
    for name, param in whole.named_parameters():
        assert param.grad is not None
        squares = torch.tensor(found[name].grad_norm ** 2 if name in found else 0.0, dtype=torch.float64)
        torch.distributed.all_reduce(squares)
        assert squares.sqrt().item() == pytest.approx(param.grad.double().norm().item(), rel=1e-5), name
