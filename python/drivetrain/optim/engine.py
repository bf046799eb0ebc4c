"""Shows one call's functions an optimizer: its rule, its groups' options, and what a step does with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from . import precision
from .kept import kept_of, stands_for_torchs
from .rule import Group, Numbers, rule_of
from .sharded.dtensors import share_matrices


def is_capturing() -> bool:
    """Returns whether a CUDA graph captures this thread's current stream. It starts no CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Engine:
    """An optimizer, with what is kept of it and its class's rule. It lives as long as one call.

    The functions that take it are in `step.py`, `native_step.py`, `state_dicts.py` and `left_to_torch.py`. The
    optimizer may be a proxy that shares the attributes of one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.kept = kept_of(optimizer)
        self.rule = rule_of(type(optimizer))
        self.class_name = type(optimizer).__name__

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's groups."""
        groups: list[Group] = self.optimizer.param_groups
        return groups

    def params(self) -> list[Tensor]:
        """Returns the parameters of all groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def description(self) -> str:
        """Returns the class with the numbers of its parameters and groups."""
        num_groups = len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        return f"{self.class_name} ({len(self.params())} parameters in {groups})"

    def formats_of(self, group: Group) -> Group:
        """Returns the group's options of precision.DEFAULTS.

        In an object that stands for torch's class, such keys are options if the constructor got options, or if the
        group's state dict had them. Otherwise they are the script's own.
        """
        found = {name: group[name] for name in precision.DEFAULTS if name in group}
        if not found or self.kept.formats or precision.VERSION_NAME in group:
            return found
        return {} if stands_for_torchs(type(self.optimizer)) else found

    def read(self, group: Group) -> Group:
        """Returns the group as the rule reads it.

        An object that stands for torch's class and got no option leaves out entries that torch's class lacks: they are
        the script's own.
        """
        own = self.rule.own_entries
        if self.kept.has_options or not own:
            return group
        return {name: value for name, value in group.items() if name not in own}

    def precision_of(self, group: Group) -> _C.Precision:
        """Converts the group's options for the native step."""
        return precision.of(self.formats_of(group))

    def asked_by(self, group: Group, index: int) -> tuple[str, _C.Precision, Numbers]:
        """Returns the group's rule, storage formats and numbers; the native code checks the numbers' ranges."""
        try:
            read = self.read(group)
            numbers = self.rule.hypers(read)
            if self.kept.offload is not None:
                numbers["lr"] = float(numbers["lr"])  # the CPU reads it, also from a tensor on a device
            return self.rule.name_of(read), self.precision_of(group), numbers
        except KeyError as missing:
            raise ValueError(f"param_groups[{index}] has no {missing}, which {self.class_name} needs") from missing
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"param_groups[{index}]: {error}") from error

    # ---- Gradient scaling: unscaling, clipping and zeroing in the step.

    @property
    def is_on_cpu(self) -> bool:
        """True if all parameters are on the CPU."""
        return all(param.device.type == "cpu" for param in self.params())

    @property
    def has_twins(self) -> bool:
        """True if the CPU steps parameters of devices."""
        return self.kept.offload is not None and not self.is_on_cpu

    def find_devices(self) -> None:
        """Determines whether all parameters share one device. Visits each one, so call it when groups change only."""
        is_one = len({param.device for param in self.params()}) <= 1
        self.kept.can_scale_in_step = is_one or self.kept.offload is not None

    @property
    def announces_scaling(self) -> bool:
        """True if a GradScaler is to leave the unscaling to the step.

        torch's classes announce it with fused=True only. Frameworks refuse to clip the gradients of such an optimizer,
        and step pre-hooks then see scaled gradients. So plain optimizers must not announce it, although the step could
        unscale.
        """
        kept = self.kept
        is_asked = kept.our_scaler_steps or kept.max_grad_norm is not None or bool(self.optimizer.defaults.get("fused"))
        return is_asked and kept.can_scale_in_step

    def step_options(self, overflow_flag: Tensor | None) -> _C.StepOptions:
        """Returns what the step does with gradients, from the optimizer's attributes."""
        scale, found_inf = self._scalar("grad_scale", 1.0), self._scalar("found_inf", 0.0)
        # A scaler's scale may grow to infinity; the gradients are then found not to be finite.
        if isinstance(scale, float) and not scale > 0 and not (isinstance(found_inf, float) and found_inf):
            raise ValueError(f"grad_scale is {scale}, expected a number above 0: gradients are divided by it")
        options = _C.StepOptions(
            grad_scale=scale,
            found_inf=found_inf,
            max_grad_norm=self.kept.max_grad_norm,
            check_finite=overflow_flag is not None,
            zero_grads=self.kept.zero_grads_in_step and not self.has_twins,
            overflow=overflow_flag
            if overflow_flag is not None and overflow_flag.is_cuda and self.kept.offload is None
            else None,
            statistics=self.kept.statistics is not None and self.kept.statistics.is_due,
        )
        group = dist.group.WORLD if self.kept.is_over_world else self.kept.process_group
        if group is not None and group.size() > 1:
            matrices = (p for each in self.param_groups if not each.get("fallback") for p in each["params"])
            share_matrices(options, group, next((p.device for p in matrices), torch.device("cpu")))
        return options

    def _scalar(self, name: str, default: float) -> float | Tensor:
        """Returns the attribute of that name; on CUDA it stays on the device if the parameters are there."""
        value = getattr(self.optimizer, name, None)
        if isinstance(value, Tensor) and value.is_cuda and not (self.kept.offload or self.is_on_cpu):
            return value.detach()
        return default if value is None else float(value)
