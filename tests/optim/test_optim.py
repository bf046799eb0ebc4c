"""Tests the optimizers against a plain reference, torch, other instruction sets and bad input."""

import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import drivetrain
from drivetrain import _C, optim
from drivetrain.optim.precision import SCALAR_NAMES
from optim_cases import CASES, TOLERANCES, TORCHS, assert_same, cases, copies, make_params, set_grads
from reference.adam import adam


def decoupled(ours: type) -> dict[str, bool]:
    return {"decoupled": True} if issubclass(ours, optim.AdamW) else {}


@cases
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_matches_the_plain_reference(case: str, dtype: torch.dtype, isa: str) -> None:
    ours, _, reference, options = CASES[case]
    options = ({"weight_decay": 0.01} if issubclass(ours, optim.AdamW) else {}) | options
    params = make_params(dtype)
    expected = [p.detach().double() for p in params]
    states: list[dict[str, Tensor]] = [{} for _ in params]
    optimizer = ours(params, **options)
    for _ in range(3):
        set_grads(params)
        for i, param in enumerate(params):
            new = reference(expected[i], param.grad.double(), states[i], **options, **decoupled(ours))
            expected[i] = new.to(dtype).double()
            for name in states[i].keys() - SCALAR_NAMES:
                states[i][name] = states[i][name].to(dtype).double()
        optimizer.step()
    assert_same([p.double() for p in params], expected, **TOLERANCES[dtype])


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_torch_with_its_states(case: str, dtype: torch.dtype) -> None:
    ours, theirs, _, options = CASES[case]
    params = make_params(dtype)
    torch_params = copies(params)
    optimizer, torch_optimizer = ours(params, **options), theirs(torch_params, **options)
    for _ in range(5):
        set_grads(params, torch_params)
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params, **TOLERANCES[dtype])
    for param, torch_param in zip(params, torch_params, strict=True):
        state, torch_state = optimizer.state[param], torch_optimizer.state[torch_param]
        assert {k for k, v in state.items() if v is not None} == {k for k, v in torch_state.items() if v is not None}
        for name, value in torch_state.items():
            if value is not None:
                assert state[name].dtype == value.dtype
                torch.testing.assert_close(state[name], value, **TOLERANCES[dtype])


@cases
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_instruction_set_gives_the_same_bits(case: str, dtype: torch.dtype) -> None:
    ours, _, _, options = CASES[case]
    start, results = make_params(dtype, shapes=[(1000,), (33,)]), []
    for isa in _C.available_isas():
        _C.force_isa(isa)
        torch.manual_seed(1)
        params = copies(start)
        optimizer = ours(params, **options)
        for _ in range(3):
            set_grads(params)
            optimizer.step()
        results.append([p.detach() for p in params] + [v for p in params for v in optimizer.state[p].values()])
    _C.force_isa("")
    for other in results[1:]:
        assert_same(results[0], other, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bits(threads: int) -> None:
    start, results = make_params(shapes=[(40_001,), (7,), (90_000,)]), []
    before = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        params = copies(start)
        set_grads(params)
        optim.AdamW(params).step()
        results.append(params)
    torch.set_num_threads(before)
    assert_same(*results, rtol=0, atol=0)


def test_a_large_step_really_runs_on_torchs_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert _C.num_step_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_float16_survives_a_load_and_a_store(isa: str) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        param = codes.view(dtype).clone().requires_grad_()
        param.grad = torch.zeros_like(param)
        optim.SGD([param], lr=0.0).step()
        numbers = ~codes.view(dtype).isnan()
        assert torch.equal(param.detach().view(torch.int16)[numbers], codes[numbers])
        assert torch.equal(param.detach().isnan(), ~numbers)


def test_stores_round_to_nearest_even_as_torch_does(isa: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32)
    ties = bits & ~0xFFFF | 0x8000  # halfway between two bfloat16 values
    halves = bits & ~0x1FFF | 0x1000  # halfway between two float16 values
    for values in (bits.view(torch.float32), ties.view(torch.float32), halves.view(torch.float32)):
        for dtype in (torch.float16, torch.bfloat16):
            param = torch.zeros_like(values, dtype=dtype).requires_grad_()
            param.grad_dtype = torch.float32
            param.grad = values.clone()
            optim.SGD([param], lr=1.0, maximize=True).step()
            assert torch.equal(param.detach().nan_to_num(123.0), values.to(dtype).nan_to_num(123.0))


def test_16_bit_parameters_take_float32_gradients() -> None:
    param = torch.randn(1000, dtype=torch.bfloat16).requires_grad_()
    expected = param.detach().double()
    param.grad_dtype = torch.float32
    param.grad = torch.randn(1000)
    optim.AdamW([param], lr=0.1).step()
    expected = adam(expected, param.grad.double(), {}, lr=0.1, weight_decay=0.01, decoupled=True)
    one_ulp = {"rtol": 2**-7, "atol": 0.0}  # float32 and float64 may round a tie differently.
    torch.testing.assert_close(param.detach().double(), expected.to(torch.bfloat16).double(), **one_ulp)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_match_torch(dtype: torch.dtype) -> None:
    params = [torch.randn(5, 7, dtype=dtype).requires_grad_()]
    torch_params = copies(params)
    optimizer, torch_optimizer = optim.AdamW(params), torch.optim.AdamW(torch_params)
    for _ in range(3):
        set_grads(params, torch_params)
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params, rtol=1e-5, atol=1e-6)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with_holes": lambda: torch.randn(6, 10)[:, ::2],
    "view": lambda: torch.randn(100)[30:60],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_contiguous", [False, True])
@cases
def test_other_strides(layout: str, grad_contiguous: bool, case: str) -> None:
    ours, theirs, _, options = CASES[case]
    param = LAYOUTS[layout]().requires_grad_()
    torch_param = param.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    optimizer, torch_optimizer = ours([param], **options), theirs([torch_param], **options)
    for _ in range(3):
        torch_param.grad = torch.randn(param.shape)
        grad = torch_param.grad.clone()
        param.grad = grad if grad_contiguous else torch.empty_like(param).copy_(grad)
        optimizer.step()
        torch_optimizer.step()
    assert_same([param], [torch_param], **TOLERANCES[torch.float32])


@cases
def test_state_dict_goes_to_torch_and_back(case: str) -> None:
    ours, theirs, _, options = CASES[case]
    params = make_params()
    optimizer = ours(params, **options)
    reference_params = copies(params)
    reference = theirs(reference_params, **options)

    def steps(count: int, *pairs: tuple[torch.optim.Optimizer, list[Tensor]]) -> None:
        for _ in range(count):
            set_grads(*[params for _, params in pairs])
            for each, _ in pairs:
                each.step()

    steps(2, (optimizer, params), (reference, reference_params))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    torch_params = copies(params)
    torch_optimizer = theirs(torch_params, **options)
    torch_optimizer.load_state_dict(torch.load(buffer))
    steps(2, (torch_optimizer, torch_params), (reference, reference_params))
    back_params = copies(torch_params)
    back = ours(back_params, **options)
    back.load_state_dict(torch_optimizer.state_dict())
    steps(2, (back, back_params), (reference, reference_params))
    assert_same(back_params, reference_params, **TOLERANCES[torch.float32])


def test_state_of_torchs_fused_class_loads() -> None:
    params = make_params(shapes=[(10,)])
    set_grads(params)
    theirs = torch.optim.AdamW(params, fused=True)
    theirs.step()
    ours = optim.AdamW(params)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.state[params[0]]["step"].item() == 2


@pytest.mark.parametrize("name", TORCHS)
def test_is_torchs_class_with_torchs_constructor(name: str) -> None:
    ours, theirs = getattr(optim, name), TORCHS[name]
    assert issubclass(ours, theirs)
    params = make_params(shapes=[(3, 4)])
    assert ours(params, 0.5).param_groups[0].keys() == theirs(params, 0.5).param_groups[0].keys()
    with pytest.raises(ValueError, match=r"[Ll]earning rate"):
        ours(make_params(shapes=[(3, 4)]), lr=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        ours([])
    if name in ("Adafactor", "Muon"):  # torch's class has no such argument either.
        with pytest.raises(TypeError, match="differentiable"):
            ours(params, differentiable=True)


def test_groups_have_their_own_options_and_steps() -> None:
    params, late = make_params(shapes=[(5,), (6,)]), make_params(shapes=[(7,)])
    torch_params, torch_late = copies(params), copies(late)
    optimizers = []
    for cls, first, second in ((optim.AdamW, params, late), (torch.optim.AdamW, torch_params, torch_late)):
        optimizer = cls([{"params": first[:1], "lr": 0.1}, {"params": first[1:], "amsgrad": True}], lr=0.01)
        optimizers.append((optimizer, first + second, second))
    for step in range(4):
        set_grads(optimizers[0][1], optimizers[1][1])
        for optimizer, _, second in optimizers:
            if step == 2:
                optimizer.add_param_group({"params": second, "weight_decay": 0.5})
            optimizer.step()
    assert_same(optimizers[0][1], optimizers[1][1], **TOLERANCES[torch.float32])
    assert optimizers[0][0].state[late[0]]["step"].item() == 2


def test_parameters_without_gradient_are_left_alone() -> None:
    params = make_params(shapes=[(5,)] * 9)
    torch_params = copies(params)
    optimizer, torch_optimizer = optim.AdamW(params), torch.optim.AdamW(torch_params)
    for step in range(4):
        set_grads(params, torch_params)
        for i in range(9):
            if step and i % 3 != step % 3:
                params[i].grad = torch_params[i].grad = None
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params, **TOLERANCES[torch.float32])
    assert [optimizer.state[p]["step"] for p in params] == [torch_optimizer.state[p]["step"] for p in torch_params]


def test_state_replaced_behind_its_back_is_seen() -> None:
    params = make_params(shapes=[(5,), (6,)])
    torch_params = copies(params)
    optimizer, torch_optimizer = optim.AdamW(params), torch.optim.AdamW(torch_params)
    for step in range(5):
        set_grads(params, torch_params)
        for each, ps in ((optimizer, params), (torch_optimizer, torch_params)):
            each.step()
            if step == 1:
                each.state[ps[0]]["exp_avg"] = torch.ones(5)
                each.state[ps[1]]["exp_avg_sq"].data = torch.full((6,), 4.0)
            if step == 2:
                ps[1].data = torch.arange(6.0)
            if step == 3:
                each.state[ps[0]] = {}
    assert_same(params, torch_params, **TOLERANCES[torch.float32])


def test_closure_hooks_schedulers_and_tensor_lr() -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([param], lr=torch.tensor(0.5))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert calls == ["pre", "post"]
    torch.testing.assert_close(param.detach(), torch.zeros(3))
    torch.testing.assert_close(torch.as_tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.05))


def test_grad_scaler_skips_and_unscales() -> None:
    param = torch.ones(4, requires_grad=True)
    reference = torch.ones(4, requires_grad=True)
    for p, cls in ((param, optim.AdamW), (reference, torch.optim.AdamW)):
        optimizer = cls([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(param, reference)
    assert param.isfinite().all()


def test_autograd_notices_that_parameters_changed() -> None:
    param = torch.ones(3, requires_grad=True)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optim.SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_conjugate_and_negative_views() -> None:
    for view in (torch.Tensor.conj, lambda x: x.conj().imag):
        param = view(torch.randn(5, dtype=torch.complex64)).requires_grad_()
        torch_param = param.detach().clone().resolve_conj().resolve_neg().requires_grad_()
        param.grad = torch.randn_like(torch_param)
        torch_param.grad = param.grad.clone()
        optim.SGD([param], lr=0.1).step()
        torch.optim.SGD([torch_param], lr=0.1).step()
        torch.testing.assert_close(param.detach().resolve_conj().resolve_neg(), torch_param.detach())


def test_a_wrong_instruction_set_changes_nothing() -> None:
    code = """
import torch
from drivetrain import optim
param = torch.ones(3, requires_grad=True)
param.grad = torch.ones(3)
optimizer = optim.AdamW([param])
try:
    optimizer.step()
except ValueError as error:
    assert "DRIVETRAIN_ISA is 'bogus'" in str(error), error
    assert not optimizer.state and torch.equal(param.detach(), torch.ones(3))
else:
    raise SystemExit("no error")
"""
    environment = {**os.environ, "DRIVETRAIN_ISA": "bogus"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


class TestBadInput:
    """Each error names the parameter, what came and what was expected, and leaves everything as it was."""

    def expect(self, bad: Tensor, error: type[Exception], message: str, named: bool = True) -> None:
        good = torch.ones(4, requires_grad=True)
        good.grad = torch.ones(4)
        params = [("good", good), ("layer.bad", bad)] if named else [good, bad]
        optimizer = optim.AdamW(params)
        before = bad.detach().clone()
        with pytest.raises(error, match=message):
            optimizer.step()
        assert torch.equal(good.detach(), torch.ones(4))
        assert torch.equal(bad.detach(), before)
        assert all(state["step"].item() == 0 for state in optimizer.state.values())

    def test_gradient_of_another_dtype(self) -> None:
        bad = torch.ones(3, requires_grad=True)
        bad.grad_dtype = None
        bad.grad = torch.ones(3, dtype=torch.float64)
        self.expect(bad, TypeError, "parameter 'layer.bad' is Float but its gradient is Double: expected Float")

    def test_gradient_of_another_dtype_without_names(self) -> None:
        bad = torch.ones(3, requires_grad=True)
        bad.grad_dtype = None
        bad.grad = torch.ones(3, dtype=torch.int64)
        self.expect(bad, TypeError, r"parameter 1 of param_groups\[0\] \(shape \[3\]\)", named=False)

    def test_sparse_gradient(self) -> None:
        embedding = torch.nn.Embedding(4, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        self.expect(embedding.weight, RuntimeError, "'layer.bad' has a sparse gradient")

    def test_state_of_another_shape(self) -> None:
        param = torch.ones(3, requires_grad=True)
        param.grad = torch.ones(3)
        optimizer = optim.AdamW([("p", param)])
        optimizer.step()
        optimizer.state[param]["exp_avg"] = torch.zeros(4)
        with pytest.raises(TypeError, match=r"'p': its state 'exp_avg' is Float of shape \[4\].*expected.*\[3\]"):
            optimizer.step()
        assert optimizer.state[param]["step"].item() == 1

    def test_tensor_subclass_that_wraps_others(self) -> None:
        with FakeTensorMode():
            fake = torch.ones(3, requires_grad=True)
            fake.grad = torch.ones(3)
        with pytest.raises(NotImplementedError, match="'p' is a tensor subclass that wraps others"):
            optim.SGD([("p", fake)]).step()

    @pytest.mark.parametrize("freed", ["it", "its gradient", "its state"])
    def test_memory_freed_under_a_tensor(self, freed: str) -> None:
        param = torch.ones(3, requires_grad=True)
        param.grad = torch.ones(3)
        optimizer = optim.AdamW([("p", param)])
        optimizer.step()
        tensors = {"it": param, "its gradient": param.grad, "its state": optimizer.state[param]["exp_avg"]}
        tensors[freed].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"'p': the memory of {freed} has been freed"):
            optimizer.step()
        assert optimizer.state[param]["step"].item() == 1

    def test_option_of_a_group(self) -> None:
        with pytest.raises(NotImplementedError, match="differentiable=True"):
            optim.AdamW([{"params": make_params(), "differentiable": True}])

    def test_device_without_kernels(self) -> None:
        param = torch.ones(3, device="meta").requires_grad_()
        param.grad = torch.ones(3, device="meta")
        with pytest.raises(NotImplementedError, match="'p' is on meta"):
            optim.AdamW([("p", param)]).step()


def test_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="DRIVETRAIN_ISA is 'sse9', but this processor offers: baseline"):
        _C.force_isa("sse9")


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cuda_gives_the_cpus_bits(case: str, dtype: torch.dtype) -> None:
    ours, _, _, options = CASES[case]
    params = make_params(dtype)
    cuda_params = [p.detach().cuda().requires_grad_() for p in params]
    optimizer, cuda_optimizer = ours(params, **options), ours(cuda_params, **options)
    for _ in range(3):
        set_grads(params, cuda_params)
        optimizer.step()
        cuda_optimizer.step()
    assert_same([p.cpu() for p in cuda_params], params, rtol=0, atol=0)


def test_public_names() -> None:
    names = {"DistributedDataParallel", "__version__", "amp", "clip_grad_norm_", "install", "optim", "uninstall"}
    assert set(drivetrain.__all__) == names | {
        "Monitor",
        "accumulate",
        "activation_budget",
        "checkpoint",
        "data",
        "float32_grad",
        "fuse_wgrad",
        "plan",
        "main_grads",
    }
