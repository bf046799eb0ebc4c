"""Tests helpers of the GPU tests: the check that nothing waits, gradients on any device, settings of warnings."""

import warnings

import pytest
import torch

import precision_cases
from waits import no_waiting


def test_the_check_for_waits_neither_warns_nor_outlives_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns that the mode is a prototype once it is on. The stand-in does so every time."""
    modes = ["default"]

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with no_waiting():
        assert modes[-1] == "error"
    assert modes == ["default", "error", "default"]
    with pytest.raises(RuntimeError, match="called a synchronizing operation"), no_waiting():
        raise RuntimeError("called a synchronizing operation")
    assert modes[-1] == "default"


def test_gradients_are_set_on_the_device_of_their_parameter() -> None:
    """On CUDA parameters, torch refuses gradients that are on the CPU; so it does on this device."""
    params = precision_cases.make_params(torch.bfloat16)
    others = [param.detach().to("meta").requires_grad_() for param in params]
    precision_cases.set_grads(params, others)
    assert all(other.grad is not None and other.grad.device == other.device for other in others)


@pytest.mark.parametrize(("module", "is_error"), [("numba.cuda", False), ("torch.optim", True), ("drivetrain", True)])
def test_a_deprecation_inside_another_package_is_no_error(module: str, is_error: bool) -> None:
    """Otherwise a package on a GPU machine would fail every test of the file that imports it."""

    def warn() -> None:
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module)

    with warnings.catch_warnings(record=True) as caught:
        if is_error:
            pytest.raises(DeprecationWarning, warn)
        else:
            warn()
    assert len(caught) == (not is_error)
