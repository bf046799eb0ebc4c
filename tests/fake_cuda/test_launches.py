"""Compares what each row of the GPU benchmarks launches with the committed table; see launches.py."""

from typing import Any

import launches
import pytest
import torch

import fake_cuda


@pytest.mark.parametrize("what", launches.rows())
def test_a_row_launches_what_the_table_says(what: str) -> None:
    found, expected = launches.line(launches.rows()[what]()), launches.committed().get(what)
    assert found == expected, f"{found}\nis not {expected}; make launches ARGS=--write writes the table again"


def test_the_table_has_no_other_rows() -> None:
    assert list(launches.committed())[2:] == list(launches.rows())  # below the head and its line


def test_kernels_have_their_symbols_and_copies_their_sides() -> None:
    from drivetrain import optim

    param: Any = torch.zeros(64, device="cuda", requires_grad=True)
    param.grad = torch.ones(64, device="cuda")
    optimizer = optim.SGD([param], lr=1.0)
    with fake_cuda.recording() as ran:
        optimizer.step()
        param.detach().fill_(2)
    names = [each.name for each in ran]
    assert any("step_kernel<" in name and name.startswith("our kernel ") for name in names)
    assert [each for each in ran if each.name == "aten::fill_.Scalar"] == [
        fake_cuda.Ran("aten::fill_.Scalar", 256, 256)  # an operator that writes a tensor counts as reading it
    ]
    assert len(launches.cells("a row", ran)) == launches.HEAD.splitlines()[-1].count("|") - 1
