"""Tests Muon against torch's: up to bfloat16's rounding in the iteration, exactly elsewhere."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import optim
from drivetrain.amp import GradScaler
from optim_cases import assert_same, assert_same_bits_everywhere, assert_updates_agree, copies, make_params, set_grads

SHAPES: list[Any] = [(64, 48), (48, 64), (32, 32), (1, 7), (7, 1), (1, 1), (48, 64), (129, 31), (0, 4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain_momentum": {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "match_rms": {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-2, "weight_decay": 0.5},
    "other_polynomial": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8, "eps": 1e-3},
    "no_iteration": {"ns_steps": 0},
}
options_of = pytest.mark.parametrize("which", OPTIONS)


@options_of
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_torch_with_its_states(which: str, dtype: torch.dtype) -> None:
    params = make_params(dtype, SHAPES)
    torch_params = copies(params)
    ours, theirs = optim.Muon(params, **OPTIONS[which]), torch.optim.Muon(torch_params, **OPTIONS[which])
    for _ in range(3):
        for p, t in zip(params, torch_params, strict=True):  # One step's differences must not count in the next.
            p.detach().copy_(t.detach())
        before = copies(params)
        set_grads(params, torch_params)
        ours.step()
        theirs.step()
        assert_updates_agree(params, torch_params, before, 0.03)
        for p, t in zip(params, torch_params, strict=True):
            assert ours.state[p].keys() == theirs.state[t].keys() == {"momentum_buffer"}
            torch.testing.assert_close(ours.state[p]["momentum_buffer"], theirs.state[t]["momentum_buffer"])


def test_16_bit_parameters_match_torch() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        params = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in SHAPES]
        torch_params, before = copies(params), copies(params)
        ours, theirs = optim.Muon(params, lr=1.0), torch.optim.Muon(torch_params, lr=1.0)
        set_grads(params, torch_params)
        ours.step()
        theirs.step()
        assert_updates_agree(params, torch_params, before, 0.05)


def test_many_matrices_are_cut_into_batches() -> None:
    """The matrices have more elements than a batch holds, and several shapes and options."""
    shapes = [(300, 70)] * 3 + [(3000, 700)] * 5 + [(300, 70)] * 2
    params = make_params(shapes=shapes)
    set_grads(params)
    before = copies(params)
    ours = optim.Muon([{"params": params[:4]}, {"params": params[4:], "ns_steps": 1}], lr=0.1, ns_steps=2)
    ours.step()
    for i in (0, 2, 3, 5, 7, 9):
        alone = before[i].detach().clone().requires_grad_()
        alone.grad = params[i].grad.clone()
        optim.Muon([alone], lr=0.1, ns_steps=2 if i < 4 else 1).step()
        assert_updates_agree([params[i]], [alone], [before[i]], 0.01)


@pytest.mark.parametrize("layout", ["transposed", "holes"])
@pytest.mark.parametrize("precision", [{}, {"state_bits": 8, "min_8bit_size": 0}])
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_other_strides(layout: str, precision: dict[str, Any], adjust_lr_fn: str | None) -> None:
    values = torch.randn(20, 90)
    reference = values.clone().requires_grad_()
    param = values.t().contiguous().t() if layout == "transposed" else torch.stack([values, values], -1)[..., 0]
    param = param.detach().requires_grad_()
    assert not param.is_contiguous()
    optimizers = [optim.Muon([p], adjust_lr_fn=adjust_lr_fn, **precision) for p in (param, reference)]
    for _ in range(3):
        grad = torch.randn(20, 90)
        param.grad, reference.grad = grad.t().contiguous().t(), grad
        for optimizer in optimizers:
            optimizer.step()
    assert_updates_agree([param], [reference], [values], 0.1 if precision else 0.03)


def test_the_momentum_has_the_same_bits_everywhere() -> None:
    """Without steps of the iteration, whose products differ, parameters have the same bits, too."""
    start = make_params(shapes=[(300, 301), (5, 7)])
    assert_same_bits_everywhere(start, lambda params: optim.Muon(params, max_grad_norm=1.0, ns_steps=0))


@pytest.mark.parametrize("zero", [False, True])
def test_unscaling_clipping_and_zeroing(zero: bool) -> None:
    params = make_params(shapes=[(30, 40), (40, 30)])
    plain = copies(params)
    before = copies(params)
    set_grads(params, plain)
    norm = torch.cat([p.grad.flatten() for p in params]).norm().item() / 4
    ours = optim.Muon(params, max_grad_norm=0.5, zero_grads_in_step=zero)
    ours.grad_scale = torch.tensor(4.0)
    ours.step()
    assert ours.grad_norm == pytest.approx(norm, rel=1e-6)
    for param in plain:
        param.grad.mul_(0.25 * 0.5 / (norm + 1e-6))
    other = optim.Muon(plain)
    other.step()
    assert_updates_agree(params, plain, before, 0.01)
    assert_same([p.grad for p in params], [p.grad * (not zero) for p in plain], rtol=1e-5, atol=1e-8)
    states = [[o.state[p]["momentum_buffer"] for p in own] for o, own in ((ours, params), (other, plain))]
    assert_same(*states, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_an_overflow_changes_nothing(scaler_class: type, beta2: float | None) -> None:
    params = make_params(shapes=[(30, 40), (40, 30)])
    optimizer, scaler = optim.Muon([{"params": params, "beta2": beta2}]), scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for bad in (False, True, False):
        set_grads(params)
        if bad:
            params[1].grad[0, 0] = math.inf
        before = copy.deepcopy([params, optimizer.state_dict()])
        scaler.step(optimizer)
        scaler.update()
        now = [params, optimizer.state_dict()]
        assert torch.equal(now[0][0], before[0][0]) == bad
        if bad:
            torch.testing.assert_close(now, before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    "precision",
    [
        {"state_bits": 8, "min_8bit_size": 0},
        {"state_bits": 16},
        {"state_bits": 8, "master_bits": 24, "min_8bit_size": 0},
        {"state_bits": 32, "master_bits": 32},
        {"rounding": "kahan"},
        {"rounding": "stochastic"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storages_of_fewer_bits(precision: dict[str, Any], dtype: torch.dtype) -> None:
    params = make_params(dtype, [(30, 40), (64, 64), (3, 3)])
    wide = [p.detach().float().requires_grad_() for p in params]
    before = copies(wide)
    optimizers = [optim.Muon(params, lr=0.02, **precision), optim.Muon(wide, lr=0.02)]
    for _ in range(4):
        set_grads(params)
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    now = [optimizers[0].float32_value(p) for p in params]
    # The updates are about as large as bfloat16's steps near 1, so that rounding loses much of them.
    keeps = dtype == torch.float32 or precision.get("master_bits") or precision.get("rounding") == "kahan"
    assert_updates_agree(now, wide, before, 0.2 if keeps else 0.6)
    bits = precision.get("state_bits")
    name = "momentum_buffer_codes" if bits == 8 else "momentum_buffer"
    wanted = {8: torch.int8, 16: torch.bfloat16, 32: torch.float32, None: dtype}[bits]
    assert all(optimizers[0].state[p][name].dtype == wanted for p in params)


def test_state_goes_to_torch_and_back() -> None:
    params = make_params(shapes=[(20, 30)])
    ours = optim.Muon(params)
    set_grads(params)
    ours.step()
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs = torch.optim.Muon(params)
    theirs.load_state_dict(torch.load(file))
    back = optim.Muon(params, state_bits=8, min_8bit_size=0)
    back.load_state_dict(theirs.state_dict())
    assert_same([back.state[params[0]]["momentum_buffer"]], [ours.state[params[0]]["momentum_buffer"]], rtol=0, atol=0)
    back.step()
    assert back.state[params[0]]["momentum_buffer_codes"].dtype == torch.int8


def test_closures_versions_and_parameters_without_gradient() -> None:
    param, other = torch.randn(4, 5).requires_grad_(), torch.randn(4, 5).requires_grad_()
    optimizer = optim.Muon([param, other])

    def closure() -> Tensor:
        loss = (param * param).sum()
        loss.backward(retain_graph=True)
        return loss

    version, untouched = param._version, other.detach().clone()
    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert param._version > version
    assert torch.equal(other.detach(), untouched)
    assert other not in optimizer.state
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": math.nan}, "Learning rate should be >= 0 but is: nan"),
        ({"momentum": -0.1}, "momentum should be >= 0 but is: -0.1"),
        ({"weight_decay": math.nan}, "weight decay should be >= 0 but is: nan"),
        ({"adjust_lr_fn": "mine"}, "Adjust learning rate function mine is not supported"),
        ({"eps": -1.0}, "eps is -1.0, expected a number of 0 or more"),
        ({"ns_steps": 100}, "ns_steps is 100. Number of steps must be less than 100"),
        (
            {"ns_coefficients": (1.0, 2.0)},
            r"ns_coefficients is \(1.0, 2.0\). Coefficients must be a tuple of exactly 3",
        ),
        ({"ns_coefficients": (1.0, math.inf, 1.0)}, "must be a tuple of exactly 3 finite values"),
    ],
)
def test_hyper_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.Muon([torch.zeros(3, 3).requires_grad_()], **options)


class TestBadInput:
    def test_not_a_matrix(self) -> None:
        matrix, vector = torch.zeros(3, 3).requires_grad_(), torch.zeros(3).requires_grad_()
        message = r"Muon only supports 2D parameters .*torch.Size\(\[3\]\) \(parameter 'norm.weight' of param_groups"
        with pytest.raises(ValueError, match=message):
            optim.Muon([("w", matrix), ("norm.weight", vector)])
        optimizer = optim.Muon([matrix])
        with pytest.raises(ValueError, match=r"parameter 0 of param_groups\[1\]"):
            optimizer.add_param_group({"params": [vector]})
        assert len(optimizer.param_groups) == 1

    def test_complex(self) -> None:
        good, param = torch.ones(2, 2).requires_grad_(), torch.ones(2, 2, dtype=torch.complex64).requires_grad_()
        good.grad, param.grad = torch.ones_like(good), torch.ones_like(param)
        with pytest.raises(
            RuntimeError, match=r"parameter 'w' is ComplexFloat of shape .* Muon does not support complex"
        ):
            optim.Muon([("good", good), ("w", param)]).step()
        assert torch.equal(good.detach(), torch.ones(2, 2))

    def test_sparse(self) -> None:
        embedding = torch.nn.Embedding(4, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="'w' has a sparse gradient"):
            optim.Muon([("w", embedding.weight)]).step()


# ---- AdamW for the rest.

FALLBACK: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.05}


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(9, 6), torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 5)
    )


def train(model: torch.nn.Module, optimizers: list[Any], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randint(0, 9, (16,), generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the groups that users write: hidden matrices, and embeddings and the rest."""
    table, others = model[0].weight, [p for p in model.parameters() if p is not model[0].weight]
    return [{"params": others}, {"params": [table], "fallback": True, "weight_decay": 0.0}]


@pytest.mark.parametrize("precision", [{}, {"state_bits": 8, "min_8bit_size": 0}])
def test_the_fallback_is_adamw(precision: dict[str, Any]) -> None:
    """One optimizer gives the bits of the two that users write by hand."""
    model, reference = small_model(), small_model()
    one = optim.Muon(groups_of(model), lr=0.01, fallback=FALLBACK | precision)
    matrices = [p for p in reference.parameters() if p.ndim == 2 and p is not reference[0].weight]
    vectors = [p for p in reference.parameters() if p.ndim != 2]
    adamw = optim.AdamW(
        [{"params": vectors}, {"params": [reference[0].weight], "weight_decay": 0.0}], **FALLBACK, **precision
    )
    train(model, [one])
    train(reference, [optim.Muon(matrices, lr=0.01), adamw])
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, other)
    assert [group["fallback"] for group in one.param_groups] == [False, True, True]
    assert one.state[model[0].weight].keys() == adamw.state[reference[0].weight].keys()


def test_the_fallback_takes_named_parameters_and_reports_its_states() -> None:
    model = small_model()
    optimizer = optim.Muon(model.named_parameters(), fallback={"state_bits": 16})
    own, rest = optimizer.param_groups
    assert own["param_names"] == ["0.weight", "1.weight", "3.weight"]
    assert rest["param_names"] == ["1.bias", "2.weight", "2.bias", "3.bias"]
    assert (rest["lr"], rest["weight_decay"], rest["amsgrad"]) == (1e-3, 1e-2, False)
    train(model, [optimizer])
    assert {"exp_avg", "exp_avg_sq", "momentum_buffer"} <= optimizer.report().bytes.keys()
    assert optimizer.state[model[1].bias]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_fallback_is_saved(way: str, amsgrad: bool) -> None:
    model = small_model()
    optimizer = optim.Muon(model.parameters(), fallback={**FALLBACK, "amsgrad": amsgrad})
    train(model, [optimizer])
    if way == "state_dict":
        reference = copy.deepcopy(model)
        other = optim.Muon(reference.parameters(), fallback={})
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, [optimizer])
        train(reference, [other])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
        return
    other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    other.add_param_group({"params": [torch.zeros(2, 2).requires_grad_(), torch.zeros(2).requires_grad_()]})
    assert [group["fallback"] for group in other.param_groups] == [False, True, False, True]
    assert other.param_groups[3]["lr"] == FALLBACK["lr"]


def test_groups_that_join_and_one_norm_for_all() -> None:
    model = small_model()
    optimizer = optim.Muon(model[1].parameters(), fallback=FALLBACK, max_grad_norm=0.5)
    optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.add_param_group({"params": model[0].weight, "fallback": True, "lr": 0.5})
    assert [group["fallback"] for group in optimizer.param_groups] == [False, True, True, True]
    assert optimizer.param_groups[3]["lr"] == 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model(torch.arange(9)).square().sum().backward()
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.double().square().sum() for p in stepped]).sum().sqrt().item()
    optimizer.step()
    scheduler.step()
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
    assert optimizer.param_groups[3]["lr"] == 0.25
    before = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="weight_decay is nan"):
        optimizer.add_param_group(
            {"params": [torch.zeros(3).requires_grad_()], "fallback": True, "weight_decay": math.nan}
        )
    assert len(optimizer.param_groups) == before


def test_no_matrix_at_all() -> None:
    param = torch.zeros(3).requires_grad_()
    optimizer = optim.Muon([param], fallback=FALLBACK)
    reference = torch.zeros(3).requires_grad_()
    other = optim.AdamW([reference], **FALLBACK)
    for _ in range(2):
        param.grad = torch.randn(3)
        reference.grad = param.grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(param, reference)


@pytest.mark.parametrize(
    ("params", "fallback", "error", "message"),
    [
        ([torch.zeros(3)], [1], TypeError, "fallback is a list, expected a dict of AdamW's options"),
        ([torch.zeros(3)], {"momentum": 0.9}, TypeError, "fallback has 'momentum', which AdamW has no option for"),
        ([torch.zeros(3)], {"lr": -1.0}, ValueError, r"lr is -1.*, expected a finite number, 0 or above"),
        ([torch.zeros(3)], {"state_bits": 7}, ValueError, "state_bits is 7"),
        ([], {}, ValueError, "optimizer got an empty parameter list"),
        (torch.zeros(3), {}, TypeError, "should be an iterable of Tensors or dicts"),
        (7, {}, TypeError, "'int' object is not iterable"),
        ([7], {}, TypeError, "optimizer can only optimize Tensors"),
    ],
)
def test_a_bad_fallback(params: Any, fallback: Any, error: type[Exception], message: str) -> None:
    if isinstance(params, list):
        params = [p.requires_grad_() if isinstance(p, Tensor) else p for p in params]
    with pytest.raises(error, match=message):
        optim.Muon(params, fallback=fallback)


def test_a_group_of_a_fallback_that_is_not_there() -> None:
    matrix, vector = torch.zeros(2, 2).requires_grad_(), torch.zeros(2).requires_grad_()
    with pytest.raises(ValueError, match="a group has fallback=True, but Muon got no fallback"):
        optim.Muon([{"params": [matrix]}, {"params": [vector], "fallback": True}])


@pytest.mark.parametrize("shape", [(513, 700), (700, 513), (601, 601)])
def test_symmetric_products_have_the_bits_of_whole_ones(shape: tuple[int, int]) -> None:
    """Large products with a symmetric result are computed in blocks up to the diagonal."""
    torch.manual_seed(0)
    param, gradient = torch.zeros(shape, requires_grad=True), torch.randn(shape)
    param.grad = gradient.clone()
    optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_steps=3).step()
    a, b, c = 3.4445, -4.775, 2.0315
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    matrix = gradient.bfloat16()[None]
    matrix = matrix / matrix.double().norm().float().bfloat16().view(1, 1, 1)
    for _ in range(3):
        factor = matrix.to(dtype)
        pair = (factor, factor.mT) if shape[0] <= shape[1] else (factor.mT, factor)
        gram = torch.bmm(*pair).bfloat16().to(dtype)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(dtype)
        pair = (polynomial, factor) if shape[0] <= shape[1] else (factor, polynomial)
        matrix = torch.baddbmm(factor, *pair, beta=a).bfloat16()
    step_size = torch.tensor(math.sqrt(max(1.0, shape[0] / shape[1])))
    assert torch.equal(param.detach(), -step_size * matrix[0].float())
