"""What every optimizer here shares: torch's Optimizer contract around one native step."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import _C

# A description of every optimizer made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []


class FusedOptimizer(torch.optim.Optimizer):
    """Mix-in placed before a torch.optim class: keeps its constructor, state and checks, and replaces its step.

    Every class takes two keyword arguments beside torch's. They, and a GradScaler's unscaling, cost no pass of their
    own over parameters or state: gradients are read once for the norm where one is asked for, and once for the step.

    * max_grad_norm: clips the 2-norm of all gradients of the optimizer together, as torch.nn.utils.clip_grad_norm_
      does; inf only measures it. A step whose gradients are not all finite is left out, with a warning.
    * zero_grads_in_step: leaves zeros in every `.grad` instead of calling zero_grad(set_to_none=False) later.

    Both are attributes too, and may be changed between steps. Otherwise `.grad` holds what the step used, unscaled and
    clipped, as after torch's own functions. `grad_scale` and `found_inf` are read from attributes of that name, as
    torch's fused optimizers read them: gradients are divided by the one, nothing is updated where the other is above 0.

    A subclass says which native rule a group follows (`_rule`) and which numbers that rule reads (`_hypers`). The
    arithmetic, and the names of each rule's states, are in csrc/optim/rules.h.
    """

    zero_grads_in_step: bool = False
    _max_grad_norm: float | None = None
    _grad_norm: float | None = None
    _skipped = False
    _overflow_flag: Tensor | None = None  # where drivetrain.amp.GradScaler wants to be told of the next step's

    def __init__(
        self, *args: Any, max_grad_norm: float | None = None, zero_grads_in_step: bool = False, **kwargs: Any
    ) -> None:
        refuse_unsupported(type(self).__name__, kwargs)
        self.max_grad_norm = max_grad_norm
        self.zero_grads_in_step = zero_grads_in_step
        super().__init__(*args, **kwargs)
        # On CUDA GradScaler must unscale beforehand.
        self._step_supports_amp_scaling = self.is_on_cpu
        count, num_groups = sum(len(group["params"]) for group in self.param_groups), len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        constructed.append(f"{type(self).__name__} ({count} parameters in {groups})")

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to; None: they are not."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ValueError(f"max_grad_norm is {value}, expected a number above 0 (inf: only measure), or None")
        self._max_grad_norm = value

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients, unscaled and before clipping; None: it was not asked for."""
        return self._grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step() left everything as it was because a gradient was not finite."""
        return self._skipped

    @property
    def is_on_cpu(self) -> bool:
        """Whether all parameters are on the CPU."""
        return all(param.device.type == "cpu" for group in self.param_groups for param in group["params"])

    def _rule(self, group: dict[str, Any]) -> str:
        """The native rule for this group, by its name in csrc/optim/rules.h."""
        raise NotImplementedError

    def _hypers(self, group: dict[str, Any]) -> dict[str, float]:
        """The group's numbers, by the names that the native rule reads."""
        raise NotImplementedError

    def _initial_state(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """What a state of `param` is before the first step."""
        return torch.zeros_like(param, memory_format=torch.preserve_format)

    def _init_states(self, params: Sequence[tuple[Tensor, dict[str, Any]]], rule: str) -> list[tuple[Tensor, str]]:
        """Fills what the state of parameters (each with its group) lacks, with torch's names, dtypes and layout.

        Returns:
            what was filled: the parameters with the names.
        """
        # float32 on the CPU, as torch keeps it by default (float64 where that is the default dtype).
        step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        filled = []
        # Name by name, so that the steps to come find each name's tensors side by side in memory.
        for name in _C.optim_state_names(rule):
            for param, group in params:
                state = self.state[param]
                if state.get(name) is not None:
                    continue
                is_count = name == "step"
                state[name] = torch.zeros((), dtype=step_dtype) if is_count else self._initial_state(param, group)
                filled.append((param, name))
        return filled

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
        overflow_flag, self._overflow_flag = self._overflow_flag, None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules = [self._rule(group) for group in self.param_groups]
        hypers = [self._hypers(group) for group in self.param_groups]
        reader = self.__dict__.get("_reader")
        if reader is None:  # copies and pickles come without one
            reader = self._reader = _C.StepReader()
        options = self._options(check_finite=overflow_flag is not None)

        def run(fresh: list[Tensor]) -> _C.StepResult:
            return _C.optim_step(reader, self.param_groups, rules, hypers, self.state, fresh, options)

        with torch.no_grad():
            result = run([])
            if result.missing:
                filled = []
                for rule in dict.fromkeys(rules):
                    lacking = [(param, self.param_groups[i]) for param, i in result.missing if rules[i] == rule]
                    filled += self._init_states(lacking, rule)
                skipped = True
                try:
                    result = run([param for param, _ in result.missing])
                    skipped = result.skipped
                finally:
                    if skipped:  # a first step is yet to come
                        self._drop_states(filled)
                assert not result.missing, "optim_state_names and optim_step disagree"
        self._grad_norm, self._skipped = result.grad_norm, result.skipped
        if overflow_flag is not None:
            overflow_flag.fill_(float(result.skipped))
        if result.skipped and getattr(self, "found_inf", None) is None:
            warnings.warn(
                f"drivetrain.optim.{type(self).__name__}: the norm of the gradients is {result.grad_norm}; the step "
                "was left out, parameters and state are as before (later ones: see last_step_skipped).",
                stacklevel=2,
            )
        return loss

    def _drop_states(self, filled: list[tuple[Tensor, str]]) -> None:
        for param, name in filled:
            del self.state[param][name]
            if not self.state[param]:
                del self.state[param]

    def _options(self, check_finite: bool) -> _C.StepOptions:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return _C.StepOptions(
            grad_scale=1.0 if grad_scale is None else float(grad_scale),
            found_inf=0.0 if found_inf is None else float(found_inf),
            max_grad_norm=self.max_grad_norm,
            check_finite=check_finite,
            zero_grads=self.zero_grads_in_step,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses the options that the constructor refuses.

        Raises:
            NotImplementedError: the group sets `capturable` or `differentiable`.
        """
        refuse_unsupported(type(self).__name__, param_group)
        super().add_param_group(param_group)
        self._step_supports_amp_scaling = self.is_on_cpu

    def __getstate__(self) -> dict[str, Any]:
        ours = {"_max_grad_norm": self._max_grad_norm, "zero_grads_in_step": self.zero_grads_in_step}
        return super().__getstate__() | ours

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes torch's state, whichever of its implementations wrote it: step counters go to the CPU."""
        super().__setstate__(state)
        self._step_supports_amp_scaling = self.is_on_cpu
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
