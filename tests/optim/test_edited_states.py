"""Tests states that a script edits between steps: appended, cut and permuted rows in every storage format."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import optim
from precision_cases import PRECISIONS, precisions, same_bits

ROW = 256  # a block of 8-bit codes, so that rows that move keep their bits


def permuted(rows: Tensor) -> Tensor:
    return rows.flip(0)


def cut(rows: Tensor) -> Tensor:
    return rows[::2].contiguous()


def appended(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(3, ROW)])


edits = pytest.mark.parametrize("edit", [permuted, cut, appended])


def stepped(optimizer: torch.optim.Optimizer, param: Tensor, grad: Tensor) -> None:
    param.grad = grad.to(param.dtype)
    optimizer.step()


def replace(optimizer: Any, param: Tensor, edit: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Edits the rows of a parameter and of its state as docs/precision.md shows."""
    new = nn.Parameter(edit(param.detach()))
    state = optimizer.float32_state(param)
    optimizer.state[new] = {name: edit(value) if value.shape == param.shape else value for name, value in state.items()}
    del optimizer.state[param]
    optimizer.param_groups[0]["params"] = [new]
    return new


@edits
@precisions
@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD])
def test_rows_keep_their_bits(optimizer_class: Any, precision: str, edit: Callable[[Tensor], Tensor]) -> None:
    if "stochastic" in precision and edit is not appended:
        pytest.skip("stochastic rounding draws by an element's index, which changes")
    torch.manual_seed(0)
    dtype = torch.float32 if precision.startswith("state") else torch.bfloat16
    options = PRECISIONS[precision] | ({"momentum": 0.9} if optimizer_class is optim.SGD else {})
    param = nn.Parameter(torch.randn(6, ROW, dtype=dtype))
    twin = nn.Parameter(param.detach().clone())
    ours, untouched = (optimizer_class([each], lr=0.01, min_8bit_size=0, **options) for each in (param, twin))
    grads = torch.randn(4, 6, ROW)
    for optimizer, each in ((ours, param), (untouched, twin)):
        stepped(optimizer, each, grads[0])
        stepped(optimizer, each, grads[1])
    new = replace(ours, param, edit)
    for grad in grads[2:]:
        stepped(ours, new, edit(grad))
        stepped(untouched, twin, grad)
    values, wanted = ours.float32_state(new), untouched.float32_state(twin)
    assert values.keys() == wanted.keys()
    assert ours.state[new].keys() == untouched.state[twin].keys()
    old_rows = slice(0, 6) if edit is appended else slice(None)
    moved = edit if edit is not appended else torch.Tensor.clone
    # Codes are stored again with scales that may differ in their last bit.
    tolerance = {"rtol": 0.0, "atol": 0.0} if "8" not in precision else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(new.detach()[old_rows], moved(twin.detach()), **tolerance)
    for name in values.keys() - {"step", "param_remainder"} if "8" in precision else values.keys() - {"step"}:
        torch.testing.assert_close(values[name][old_rows], moved(wanted[name]), **tolerance)


def with_zeros(codes: Tensor) -> Tensor:
    return torch.cat([codes, torch.zeros(3, ROW)])


def as_ints(codes: Tensor) -> Tensor:
    return codes.int()


def with_other_sign(codes: Tensor) -> Tensor:
    return codes.view(torch.int8 if codes.dtype == torch.uint8 else torch.uint8)


@pytest.mark.parametrize("then", [{}, {"state_bits": 32}, {"state_bits": "fp8"}, {"state_bits": None}])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("edit", [with_zeros, as_ints, with_other_sign])
def test_codes_of_another_dtype_are_named(edit: Callable[[Tensor], Tensor], name: str, then: dict[str, Any]) -> None:
    """Concatenated codes and zeros are float32; a step took the codes for values."""
    param = nn.Parameter(torch.randn(6, ROW))
    optimizer = optim.AdamW([("points", param)], state_bits=8, min_8bit_size=0)
    stepped(optimizer, param, torch.randn(6, ROW))
    state = optimizer.state.pop(param)
    new = nn.Parameter(torch.cat([param.detach(), torch.zeros(3, ROW)]) if edit is with_zeros else param.detach())
    optimizer.param_groups[0] |= {"params": [new], **then}
    optimizer.state[new] = state | {f"{name}_codes": edit(state[f"{name}_codes"])}
    before = new.detach().clone()
    with pytest.raises(TypeError, match=f"'points'.*'{name}_codes' is torch.*expected codes.*float32_state"):
        stepped(optimizer, new, torch.randn_like(new))
    assert same_bits(new.detach(), before)
    if edit is not with_other_sign:  # Only the step knows of which state those bytes are.
        with pytest.raises(TypeError, match=r"the state '.*_codes' is torch"):
            optimizer.torch_state_dict()


def test_the_state_of_another_parameter() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = optim.AdamW([param])
    assert optimizer.float32_state(param) == {}
    with pytest.raises(KeyError, match="shape \\(2,\\) that is not in this optimizer"):
        optimizer.float32_state(torch.zeros(2))
