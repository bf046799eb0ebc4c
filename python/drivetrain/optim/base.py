"""The base of every optimizer here: torch's Optimizer contract around one native step."""

import time
import warnings
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .. import _C
from . import pieces, precision
from .in_backward import WHY_NOT_CLIPPED, StepInBackward
from .left_to_torch import LeftToTorch, constructed, in_place_of
from .native_step import hypers, learning_rate
from .report import Counts, Report, report_of
from .sharded_step import Measured

__all__ = ["FusedOptimizer", "hypers", "in_place_of", "learning_rate"]


class FusedOptimizer(LeftToTorch):
    """Replaces the step of a torch.optim class and keeps its constructor, state and checks.

    Place it before the torch.optim class among the bases. Every class takes keyword arguments beside torch's.

    Two arguments change what a step does with gradients. They, and a GradScaler's unscaling, add no pass over
    parameters or states. A step reads gradients once for the norm, where it needs one, and once for the update.

    * max_grad_norm: Clips the 2-norm of all gradients of the optimizer together, as torch.nn.utils.clip_grad_norm_
      does. `inf` only measures the norm. A step with gradients that are not finite is skipped, with a warning.
    * zero_grads_in_step: Fills every `.grad` with zeros instead of a later zero_grad(set_to_none=False). On CUDA prefer
      zero_grad(), which sets gradients to None: backward then hands over its gradients instead of adding them to zeros.
      On an H100 that addition takes 1 ms and 0.47 GiB per step of GPT-2 124M.

    Both are attributes too and may change between steps. After a step `.grad` holds the unscaled, clipped gradient, as
    after torch's own functions. `grad_scale` and `found_inf` are attributes, as in torch's fused optimizers: the step
    divides gradients by `grad_scale` and updates nothing where `found_inf` is above 0.

    On CUDA step() never waits for the device. Reading `grad_norm` or `last_step_skipped` does. A skipped step gives no
    warning there, and the states that a first step creates remain, although it was skipped. Only SGD's dampening
    depends on that: the first gradient then counts less. A hyper-parameter other than `lr` that is a CUDA tensor makes
    step() wait, as in torch.

    Step counters of CUDA parameters are float32 tensors on their device, as with torch's fused optimizers; loading a
    state moves them there. A step may be captured into a CUDA graph once a step outside the graph has created the
    states. Replays follow a learning rate that is a tensor on the device. `capturable` has no effect.

    Four arguments choose storage formats. Each may also be a key of a parameter group and may change between steps. The
    arithmetic stays in float32.

    * state_bits: 32 (float32), 16 (bfloat16), 8 (codes) or "fp8" (e4m3, and e5m2 for means of squares). 8-bit values
      share a float32 scale per block of 256. None keeps the parameter's dtype, as torch does, but float32 for
      float16 parameters with a master or a `rounding`. Vectors of at most 65,536 elements and parameters of fewer than
      `min_8bit_size` elements keep float32 instead of 8 bits.
    * master_bits: Keeps 32 or 24 bits of 16-bit parameters; None keeps their 16 bits. A bfloat16 parameter holds the
      leading half of its float32 value, rounded with ties away from zero. The state keeps the remainder in
      `param_remainder`: int16, which loses nothing, or int8. A float16 parameter is a copy of a float32 tensor in the
      state, `param_master`; it supports only 32.
    * rounding: Applies to 16-bit parameters without a master. "stochastic" rounds up with a probability equal to the
      distance from the lower value. Its random bits depend only on the parameter's position, the step and the element's
      index, so every rank and run draws the same. "kahan" keeps the rounding error in the state, in the parameter's
      dtype, as `param_compensation`.

    Each rank steps its own part of DTensor parameters (fully_shard(), tensor parallelism, HSDP). The result has the
    bits of a step of the whole parameter, and only norms need communication. States are DTensors with the parameter's
    placements, as in torch's classes. torch.distributed.checkpoint.state_dict saves and loads them on any number of
    ranks. Three things depend on the part: the blocks of 8-bit states, which are plain tensors in `state`;
    `min_8bit_size`; and the element's index in stochastic rounding. `max_grad_norm` clips the norm over all ranks'
    parts and counts each distinct part once. The step redistributes gradients of other placements, such as partial
    sums, in `.grad`. LAMB's norms and Adafactor's means are summed over the ranks; Muon gathers its matrices one at a
    time.

    Under DistributedDataParallel(shard=...) each rank steps its rows of plain parameters in the same way. States are
    DTensors of the parameters' shapes. After a step that unscales, clips or zeroes, only these rows of `.grad` show it.

    csrc/optim/rules/ has the arithmetic, and csrc/optim/rules.h the names of each rule's states.
    """

    steps_pieces = True  # pieces.py leaves the step alone

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: precision.StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
        **kwargs: Any,
    ) -> None:
        self._is_in_constructor = True
        self.max_grad_norm = max_grad_norm
        self.zero_grads_in_step = zero_grads_in_step
        self._counts = Counts()
        asked = {
            "state_bits": state_bits,
            "master_bits": master_bits,
            "min_8bit_size": min_8bit_size,
            "rounding": rounding,
        }
        precision.check(asked)
        # Groups without such options keep torch's keys only.
        self._precision = {option: value for option, value in asked.items() if value != precision.DEFAULTS[option]}
        self._refuse_unsupported(kwargs)
        super().__init__(*args, **kwargs)
        self._leave_what_groups_refused()
        if type(self) in in_place_of.values():  # see _stay_torchs
            return
        self._is_in_constructor = False
        self._place_step_counters()
        self._find_devices()
        constructed.append(self._description())

    def _description(self) -> str:
        count, num_groups = sum(len(group["params"]) for group in self.param_groups), len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        return f"{type(self).__name__} ({count} parameters in {groups})"

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Args:
            closure: Reevaluates the model and returns the loss, as in torch.

        Raises:
            TypeError: A gradient's or state's dtype, or a state's shape, does not fit its parameter. A parameter was
            cast since the last step, or a hyper-parameter is not a number. The message names the parameter.
            ValueError: A gradient's shape or device does not fit its parameter. Two parameters share memory, or two
            gradients do in a step that writes them. A group lacks a hyper-parameter or has one out of range. The
            environment variable DRIVETRAIN_ISA names no instruction set of this processor.
            RuntimeError: A gradient is sparse and the rule is neither SGD's nor Adagrad's, or a CUDA graph captures the
            first step, which creates states.
            NotImplementedError: The parameters are tensor subclasses other than DTensor, or on a device without kernels
            in this build. They are on several devices where max_grad_norm or a GradScaler needs one.

            After an error no parameter, state or step counter has changed.
        """
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                "drivetrain's optimizers step outside of compiled graphs: call step() outside of the function that "
                "torch.compile(fullgraph=True) compiles, or leave fullgraph out."
            )
            return self._step_outside_the_graph(closure)
        return self._step(closure)

    @_disable_dynamo
    def _step_outside_the_graph(self, closure: Callable[[], float] | None) -> float | None:
        return self._step(closure)

    def step_in_backward(
        self, model: nn.Module, *, clip_by_previous_norm: float | None = None, bucket_cap_mb: float = 25.0
    ) -> StepInBackward:
        """Steps each of the model's parameters during backward, as soon as its gradient exists, and frees the gradient.

        Gradients then take the memory of one bucket at a time. With bfloat16 parameters, `master_bits=24` and
        `state_bits=8`, training keeps 5 bytes per parameter. Under drivetrain's DistributedDataParallel a bucket is
        stepped once it is reduced, while backward and other reductions continue. Buckets then share the memory of a
        few, except with find_unused_parameters, a static graph or main_grads(), where the flat gradient buffer stays.
        Every rank must call this, and not during backward.

        The training loop stays the same except for clipping, which must go. `step()` then steps the parameters that
        backward has not stepped, for example those outside the model; hooks on steps and schedulers still work.
        `zero_grad()` finds no gradients. Backward uses the learning rates of its own time. To accumulate micro-batches,
        run all but the last backward under the returned object's `no_step()`, or all of them in
        drivetrain.accumulate(). A backward that steps adds its gradients to existing ones and steps with the sum.

        Limitations: an exception inside backward leaves some parameters stepped. Gradients that are not finite are
        used. A parameter whose gradient arrives in several parts in one backward, as with reentrant activation
        checkpointing, is stepped with each part. Only one thread's backward may step. `max_grad_norm` and GradScaler
        raise, because they need all gradients before the first update. A scaler raises at its step, after the first
        backward.

        Args:
            model: Contains some of this optimizer's parameters. Wrap it into DistributedDataParallel first.
            clip_by_previous_norm: Scales the gradients of a backward as if their norm were that of the backward before;
            the first backward is not scaled. This differs from torch.nn.utils.clip_grad_norm_: a sudden spike passes,
            and the next step is clipped. Not supported with reentrant activation checkpointing.
            bucket_cap_mb: MiB of gradients to collect before a step. DistributedDataParallel uses its own bucket size.

        Returns:
            An object with `no_step()`, `remove()` and, with clip_by_previous_norm, `grad_norm`.

        Raises:
            NotImplementedError: max_grad_norm is set, the model is wrapped into another parallel class, a parameter is
            a DTensor, or torch's class steps some of the parameters.
            TypeError: `model` is not a module.
            ValueError: clip_by_previous_norm or bucket_cap_mb is not above 0, or the optimizer has no parameter of the
            model.
            RuntimeError: step_in_backward() is active already, or a DistributedDataParallel outside the model reduces
            some of the parameters. If that wraps them later, backward raises.
        """
        if self._steps_as_torch or self._left_to_torch:
            raise NotImplementedError(
                f"step_in_backward() steps no parameter by torch's own {self._torchs_base().__name__}, and this "
                "optimizer leaves some to it: call step() after backward."
            )
        if self.in_backward is not None:
            raise RuntimeError("step_in_backward() was called before: call remove() on what it returned first.")
        if self.max_grad_norm is not None:
            raise NotImplementedError(f"max_grad_norm is {self.max_grad_norm}, but {WHY_NOT_CLIPPED}")
        if clip_by_previous_norm is not None and not clip_by_previous_norm > 0:
            raise ValueError(f"clip_by_previous_norm is {clip_by_previous_norm}, expected a number above 0, or None")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, expected a number above 0")
        self.in_backward = StepInBackward(self, model, clip_by_previous_norm, bucket_cap_mb)
        return self.in_backward

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        overflow_flag, self._overflow_flag = self._overflow_flag, None
        if self.in_backward is not None and (overflow_flag is not None or hasattr(self, "found_inf")):
            raise RuntimeError(
                f"drivetrain.optim.{type(self).__name__}: GradScaler cannot be used with step_in_backward(): it must "
                "check all gradients before any update. Train in bfloat16 without a scaler, or call step() after "
                "backward."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reader is None:  # Copied and unpickled optimizers have no reader.
            self._reader = _C.StepReader()
            self._reader.leave_out(self._left_to_torch)
        if self._steps_as_torch:
            self._step_as_torch(self._params(), overflow_flag)
            return loss
        begin, refusal = time.perf_counter(), None
        if not self._left_to_torch:
            try:
                result, swapped = self._step_natively(self._reader, overflow_flag)
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # Nothing has changed.
                if self._torchs_class() is None:
                    raise
                refusal = error
        if self._left_to_torch or refusal is not None:
            num_states = len(self.state)
            self._step_left(self._reader, refusal, overflow_flag)
            if self._steps_as_torch:
                return loss
            overflow_flag = None
            result, swapped = self._step_natively(self._reader, overflow_flag)
            self._order_states(num_states)
        if swapped is not None:
            if self.zero_grads_in_step:
                swapped.zero_gradients()
            swapped.gather()
        self._result = result
        # Copied and unpickled optimizers have no counts.
        counts: Counts = self.__dict__.setdefault("_counts", Counts())
        seconds = time.perf_counter() - begin
        if result.is_on_device:  # Reading the result would wait for the device.
            counts.add(None, None, False, seconds)
            return loss
        counts.add(result.grad_norm, self.max_grad_norm, result.skipped, seconds)
        if overflow_flag is not None:
            overflow_flag.fill_(float(result.skipped))
        if result.skipped and getattr(self, "found_inf", None) is None:
            warnings.warn(
                f"drivetrain.optim.{type(self).__name__}: the norm of the gradients is {result.grad_norm}; the step "
                "was left out, parameters and state are as before (later ones: see last_step_skipped).",
                stacklevel=3,
            )
        return loss

    def _step_natively(
        self, reader: _C.StepReader, overflow_flag: Tensor | None
    ) -> tuple[_C.StepResult | Measured, pieces.Swapped | None]:
        with pieces.in_place(self, with_gradients=True) as swapped:
            return self._step_all(reader, self._options(overflow_flag)), swapped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, and rejects the options that the constructor rejects.

        Raises:
        NotImplementedError: The group sets `differentiable`, or has a DTensor that the rule cannot step. Such a DTensor
        is an unreduced partial sum, or is to be gathered in a storage format that only parts can have.
        ValueError: An option or a hyper-parameter of the group is out of range or not finite.
        TypeError: A hyper-parameter is not a number, or the group is not a dict.

        After an error the optimizer has the groups that it had before.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")  # torch's words
        self._refuse_unsupported(param_group)
        for option, value in self._precision.items():
            param_group.setdefault(option, value)
        precision.check(param_group)
        super().add_param_group(param_group)
        refused = self._refused_in(len(self.param_groups) - 1)
        if refused and self._torchs_class() is None:
            self.param_groups.pop()
            raise refused[0][1]
        self._note_refused(refused)
        self._find_devices()

    def report(self) -> Report:
        """Reports memory per parameter, bytes moved by a step, rounding losses, and clipped and skipped steps.

        Print the report or read its attributes. It works at any time. Before the first step, and after `zero_grad()`,
        it gives expected sizes. The share of updates lost to rounding needs gradients: the report steps copies of the
        16-bit parameters, one at a time. Measuring the memory bandwidth takes a few hundred milliseconds.
        """
        with pieces.in_place(self, with_gradients=True):
            return report_of(self, self.__dict__.get("_counts", Counts()))
