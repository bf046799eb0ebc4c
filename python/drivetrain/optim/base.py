"""What every optimizer here shares: torch's Optimizer contract around one native step."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import _C

# A description of every optimizer made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []


class FusedOptimizer(torch.optim.Optimizer):
    """Mix-in placed before a torch.optim class: keeps its constructor, state and checks, and replaces its step.

    A subclass says which native rule a group follows (`_rule`) and which numbers that rule reads (`_hypers`). The
    arithmetic, and the names of each rule's states, are in csrc/optim/rules.h.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_unsupported(type(self).__name__, kwargs)
        super().__init__(*args, **kwargs)
        # torch's fused classes unscale inside their step; ours do not yet, so GradScaler must do it beforehand.
        self._step_supports_amp_scaling = False
        count, num_groups = sum(len(group["params"]) for group in self.param_groups), len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        constructed.append(f"{type(self).__name__} ({count} parameters in {groups})")

    def _rule(self, group: dict[str, Any]) -> str:
        """The native rule for this group, by its name in csrc/optim/rules.h."""
        raise NotImplementedError

    def _hypers(self, group: dict[str, Any]) -> dict[str, float]:
        """The group's numbers, by the names that the native rule reads."""
        raise NotImplementedError

    def _init_states(self, params: Sequence[Tensor], rule: str) -> None:
        """Fills what the state of `params` lacks, with torch's names, dtypes and layout."""
        # float32 on the CPU, as torch keeps it by default (float64 where that is the default dtype).
        step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        # Name by name, so that the steps to come find each name's tensors side by side in memory.
        for name in _C.optim_state_names(rule):
            for param in params:
                state = self.state[param]
                if name == "step":
                    state.setdefault(name, torch.zeros((), dtype=step_dtype))
                elif state.get(name) is None:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            TypeError: a gradient's or state's dtype does not fit its parameter; the message names the parameter.
            ValueError: a gradient's shape or device does not fit its parameter.
            RuntimeError: a gradient is sparse.
            NotImplementedError: the parameters are on a device for which this build has no kernels, or are tensor
                subclasses that wrap others (DTensor).
            ValueError: the environment variable DRIVETRAIN_ISA names no instruction set of this processor.
            In every case no parameter and no step counter has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules = [self._rule(group) for group in self.param_groups]
        hypers = [self._hypers(group) for group in self.param_groups]
        reader = self.__dict__.get("_reader")
        if reader is None:  # copies and pickles come without one
            reader = self._reader = _C.StepReader()
        with torch.no_grad():
            missing = _C.optim_step(reader, self.param_groups, rules, hypers, self.state, [])
            if missing:
                for rule in dict.fromkeys(rules):
                    self._init_states([param for param, group in missing if rules[group] == rule], rule)
                fresh = [param for param, _ in missing]
                still_missing = _C.optim_step(reader, self.param_groups, rules, hypers, self.state, fresh)
                assert not still_missing, "optim_state_names and optim_step disagree"
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses the options that the constructor refuses.

        Raises:
            NotImplementedError: the group sets `capturable` or `differentiable`.
        """
        refuse_unsupported(type(self).__name__, param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes torch's state, whichever of its implementations wrote it: step counters go to the CPU."""
        super().__setstate__(state)
        for values in self.state.values():
            step = values.get("step")
            if isinstance(step, Tensor) and (step.device.type != "cpu" or not step.is_floating_point()):
                values["step"] = step.detach().to("cpu", torch.float32)


def refuse_unsupported(name: str, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for torch's constructor options that would otherwise be ignored in silence.

    `foreach` and `fused` choose between torch's implementations; ours is always fused, so they change nothing.
    """
    for option, instead in (
        ("capturable", "leave it out (steps inside a CUDA graph are not supported yet)"),
        ("differentiable", f"use torch.optim.{name} to differentiate through the step"),
    ):
        if options.get(option):
            raise NotImplementedError(f"drivetrain.optim.{name} does not support {option}=True: {instead}")
