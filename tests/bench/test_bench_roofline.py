"""Tests the bytes behind the rooflines of `drivetrain bench optim`."""

import pytest
import torch

from drivetrain import optim
from drivetrain.bench import roofline
from drivetrain.bench.measure import Row, print_table


@pytest.mark.parametrize(
    ("dtype", "options", "grad_passes", "expected"),
    [
        (torch.float32, {}, 1, 28),
        (torch.float32, {}, 3, 36),
        (torch.bfloat16, {}, 1, 14),
        # Value and remainder 2 x 4, gradient 3 x 2, codes 2 x 2, and 2 float32 scales per 256 values, read and written.
        (torch.bfloat16, {"master_bits": 32, "state_bits": 8}, 3, 18 + 16 / 256),
    ],
)
def test_bytes_per_parameter(dtype: torch.dtype, options: dict[str, int], grad_passes: int, expected: float) -> None:
    param = torch.randn(64, 256).to(dtype).requires_grad_()
    param.grad = torch.randn(64, 256).to(dtype)
    optimizer = optim.AdamW([param], **options)  # type: ignore[arg-type]
    optimizer.step()
    assert roofline.least_bytes([param], optimizer, grad_passes=grad_passes) == expected * param.numel()


def test_passes_before_the_update_count() -> None:
    param = torch.randn(64, 256).requires_grad_()
    param.grad = torch.randn(64, 256)
    optimizer = optim.LAMB([param])
    optimizer.step()
    assert roofline.least_bytes([param], optimizer, param_passes=3, state_passes=3) == 40 * param.numel()


def test_a_table_shows_rooflines_only_where_a_row_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    plain, bound = Row("plain", "ms", 2.0, 1.0), Row("bound", "ms", 2.0, 1.0)
    print_table("without", [plain])
    assert "roofline" not in capsys.readouterr().out
    roofline.with_roofline(bound, 1 << 30)
    assert bound.roofline is not None
    print_table("with", [plain, bound])
    shown = capsys.readouterr().out
    assert "roofline" in shown
    assert f"{bound.roofline:.2f} ms" in shown
    assert bound.as_dict()["roofline"] == bound.roofline
