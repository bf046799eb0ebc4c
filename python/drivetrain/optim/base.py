"""The base of every optimizer here: torch's Optimizer contract around one native step."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from . import precision, state_dicts, step, twins
from .engine import Engine
from .in_backward import OverlappedOffload, StepInBackward
from .kept import NAME, Kept, check_max_grad_norm, extra, kept_of, option, stands_for_torchs
from .left_to_torch import end_constructor
from .report import Report, report_of
from .sharded import pieces
from .statistics import Statistics, begin


class FusedOptimizer(torch.optim.Optimizer):
    """Replaces the step of a torch.optim class and keeps its constructor, state and checks.

    Place it before the torch.optim class among the bases. Every class takes keyword arguments in addition to torch's.

    Two arguments change what a step does with gradients. They, and a GradScaler's unscaling, add no pass over
    parameters or states. A step reads gradients once for the norm, where it needs one, and once for the update.

    * max_grad_norm: Clips the 2-norm of all gradients of the optimizer together, as torch.nn.utils.clip_grad_norm_
      does. `inf` only measures the norm. A step with gradients that are not finite is skipped, with a warning.
    * zero_grads_in_step: Fills every `.grad` with zeros instead of a later zero_grad(set_to_none=False). On CUDA prefer
      zero_grad(), which sets gradients to None: backward then hands over its gradients instead of adding them to zeros.

    Both are attributes too and may change between steps. After a step `.grad` holds the unscaled, clipped gradient, as
    after torch's own functions. The step divides gradients by the attribute `grad_scale`, and updates nothing where
    `found_inf` is above 0, as torch's fused optimizers do.

    Four arguments choose storage formats. Each may also be a key of a parameter group and may change between steps. The
    arithmetic stays in float32.

    * state_bits: 32 (float32), 16 (bfloat16), 8 or 4 (codes) or "fp8" (e4m3, and e5m2 for means of squares). 8-bit
      values share a float32 scale per block of 256, and 4-bit values per 128. Two 4-bit values share a byte of a vector
      in memory order. None keeps the parameter's dtype, as torch does, but float32 for float16 parameters with a master
      or a `rounding`. Vectors of at most 65,536 elements and parameters of fewer than `min_8bit_size` elements keep
      float32 instead of 8 or 4 bits. 4 bits also need 256 elements.
    * master_bits: Keeps 32 or 24 bits of 16-bit parameters; None keeps their 16 bits. The state keeps the remainder of
      a bfloat16 parameter in `param_remainder`: int16, which loses nothing, or int8. A float16 parameter is a copy of a
      float32 tensor in the state, `param_master`; it supports only 32.
    * rounding: Applies to 16-bit parameters without a master. "stochastic" rounds up with a probability equal to the
      distance from the lower value, and every rank and run draws the same. "kahan" keeps the rounding error in the
      state, in the parameter's dtype, as `param_compensation`.

    `offload="cpu"` keeps states of parameters on a GPU in host memory, where the CPU steps them with the same bits.
    step() waits for their gradients, and `.grad` is neither unscaled nor clipped after it. Parameters on the CPU are
    stepped as without it. overlap_offload() hides the copies and the CPU's work.

    On CUDA step() never waits for the device. Reading `grad_norm` or `last_step_skipped` does. A skipped step gives no
    warning there, and the states that a first step creates remain. Only SGD's dampening depends on that: the first
    gradient then counts less. A hyper-parameter other than `lr` that is a CUDA tensor makes step() wait, as in torch.
    Step counters of CUDA parameters are float32 tensors on their device; loading a state moves them there. A step may
    be captured into a CUDA graph once a step outside the graph has created the states. Replays follow a learning rate
    that is a tensor on the device.

    Each rank steps its own part of DTensor parameters, with the bits of a step of the whole parameter. States are
    DTensors with the parameter's placements. Three things depend on the part: the blocks of coded states, which are
    plain tensors in `state`; `min_8bit_size`; and the element's index in stochastic rounding. `max_grad_norm` clips the
    norm over all ranks' parts and counts each distinct part once. The step redistributes gradients of other placements
    in `.grad`. Under DistributedDataParallel(shard=...) each rank steps its rows of plain parameters in the same way.
    After a step that unscales, clips or zeroes, only these rows of `.grad` show it.

    csrc/optim/rules/ has the arithmetic, and csrc/optim/rules.h the names of each rule's states.
    """

    # A GradScaler sets these around a step and deletes them after it.
    grad_scale: float | Tensor
    found_inf: float | Tensor

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: precision.StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
        offload: Literal["cpu"] | None = None,
        fallback: dict[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        kept = self.__dict__[NAME] = Kept()
        kept.is_in_constructor = True
        check_max_grad_norm(max_grad_norm)
        kept.max_grad_norm, kept.zero_grads_in_step = max_grad_norm, zero_grads_in_step
        asked = dict(zip(precision.DEFAULTS, (state_bits, master_bits, min_8bit_size, rounding), strict=True))
        precision.check(asked)
        twins.check(offload, type(self).__name__)
        kept.offload = offload
        # Groups without such options keep torch's keys only.
        kept.formats = {name: value for name, value in asked.items() if value != precision.DEFAULTS[name]}
        is_asked = max_grad_norm is not None or zero_grads_in_step or bool(kept.formats)
        is_asked |= offload is not None or fallback is not None or process_group is not None
        kept.has_options = is_asked or not stands_for_torchs(type(self))
        kept.fallback = fallback
        kept.is_over_world = process_group is not None and process_group is dist.group.WORLD
        kept.process_group = None if kept.is_over_world else process_group
        engine = Engine(self)
        step.refuse_options(engine, kwargs)
        if len(args) == 2 and isinstance(args[1], dict):  # a subclass calls the base of torch's class: super(SGD, self)
            torch.optim.Optimizer.__init__(self, *args, **kwargs)
        else:
            super().__init__(*args, **kwargs)
        if end_constructor(engine):
            state_dicts.place_step_counters(engine)
            engine.find_devices()
            self.__dict__.pop("_step_supports_amp_scaling", None)  # torch's fused classes set it

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
            return _step_outside_the_graph(self, closure)
        return step.step(Engine(self), closure)

    def step_in_backward(
        self, model: nn.Module, *, clip_by_previous_norm: float | None = None, bucket_cap_mb: float = 25.0
    ) -> StepInBackward:
        """Steps each of the model's parameters during backward, as soon as its gradient exists, and frees the gradient.

        Gradients then take the memory of one bucket at a time. Under drivetrain's DistributedDataParallel a bucket is
        stepped once it is reduced, while backward and other reductions continue. Buckets then share the memory of a
        few, except with find_unused_parameters, a static graph or main_grads(), where the flat gradient buffer stays.
        Every rank must call this, and not during backward.

        The training loop stays the same except for clipping, which must go. `step()` then steps the parameters that
        backward has not stepped, for example those outside the model; hooks on steps and schedulers still work.
        Backward uses the learning rates of its own time. To accumulate micro-batches, run all but the last backward
        under the returned object's `no_step()`, or all of them in drivetrain.accumulate(). A backward that steps adds
        its gradients to existing ones and steps with the sum.

        Limitations: an exception inside backward leaves some parameters stepped. Gradients that are not finite are
        used. A parameter whose gradient arrives in several parts in one backward, as with reentrant activation
        checkpointing, is stepped with each part. Only one thread's backward may step. `max_grad_norm` and GradScaler
        raise, because they need all gradients before the first update.

        Args:
            model: Contains some of this optimizer's parameters. Wrap it into DistributedDataParallel first.
            clip_by_previous_norm: Scales the gradients of a backward as if they had the last backward's norm; the first
                backward is not scaled. This differs from torch.nn.utils.clip_grad_norm_: a sudden spike
                passes, and the next step is clipped. Not supported with reentrant activation checkpointing.
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
        found = kept_of(self).in_backward = StepInBackward(self, model, clip_by_previous_norm, bucket_cap_mb)
        return found

    def overlap_offload(self, model: nn.Module, *, bucket_cap_mb: float = 25.0) -> OverlappedOffload:
        """Overlaps steps with offload="cpu": gradients leave in backward, and values return in the next forward.

        Gradients are copied as soon as they exist; under drivetrain's DistributedDataParallel, bucket by bucket once
        they are reduced. step() waits for them and clips by their norm. The CPU steps a bucket of parameters when the
        model first uses one of them. It copies the values while the device works on earlier layers.

        Results have the bits of steps without it. The loop stays the same. Whatever takes a parameter from its module
        waits for its step: a forward, state_dict(), parameters(). A script that keeps parameters elsewhere calls wait()
        before it reads them, or `optimizer.state`. Every rank must call this, and not during backward.

        Args:
            model: Contains some of this optimizer's parameters. Wrap it into DistributedDataParallel first.
            bucket_cap_mb: The size of the buckets that are stepped together, in MiB.

        Returns:
            An object with `wait()` and `remove()`.

        Raises:
            ValueError: The optimizer has no `offload`, or no parameter of the model on a device. Or bucket_cap_mb is
                not above 0.
            RuntimeError: overlap_offload() is active already. In backward: a parameter got a gradient that something
                computed past its module, from the values before the last step.
            NotImplementedError: The model is wrapped into another parallel class.
        """
        found = kept_of(self).overlapped = OverlappedOffload(self, model, bucket_cap_mb)
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, and rejects the options that the constructor rejects.

        After an error the optimizer has the groups that it had before.

        Raises:
            NotImplementedError: The group sets `differentiable`, or has a DTensor that the rule cannot step. Such a
                DTensor is an unreduced partial sum, or is to be gathered in a storage format that only parts can have.
            ValueError: An option or a hyper-parameter of the group is out of range or not finite. Or the group's
                storage formats do not support a parameter's dtype.
            TypeError: A hyper-parameter is not a number, or the group is not a dict.
        """
        step.add_group(Engine(self), super().add_param_group, param_group)

    def __getstate__(self) -> dict[str, Any]:
        if (overlapped := kept_of(self).overlapped) is not None:
            overlapped.wait()
        return super().__getstate__() | {NAME: kept_of(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accepts torch's state, whichever of its implementations wrote it, and moves step counters to their device."""
        super().__setstate__(state)
        state_dicts.restore(Engine(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch does, but every state keeps the dtype in which it was saved.

        The next step converts states to the storage format that their group asks for, for example to 8 bits with
        state_bits=8. As in torch, the group's options are the saved ones.

        Raises:
            ValueError: The groups do not fit, as in torch, or a saved group has an option out of range. The state
                belongs to another optimizer or to a newer version of drivetrain.

            After an error the optimizer has the groups and states that it had before.
        """
        state_dicts.load(Engine(self), super().load_state_dict, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict as torch does; groups with drivetrain's options also hold the version of its formats.

        Coded states of DTensors are float32 DTensors in it, because their blocks belong to one rank's part and another
        number of ranks has other parts. After loading, the next step converts them to codes again, to the same codes
        where the parts are the same.
        """
        return state_dicts.save(Engine(self), super().state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """Returns state_dict() in torch's own layout, for training to continue with torch's class.

        Compressed states become float32 tensors, and drivetrain's own entries are left out. Step counters and scalars
        move to the CPU unless the group sets `fused` or `capturable`. load_state_dict() loads it back. torch's state
        has no place for the bits of a master beyond the parameter's; float32_value() returns them.
        """
        return state_dicts.torch_state_dict(Engine(self))

    def float32_value(self, param: Tensor) -> Tensor:
        """Returns a parameter's value as a new float32 tensor of its shape.

        Includes the bits of its master, remainder or compensation, if the optimizer keeps one.

        Raises:
            KeyError: The parameter is not this optimizer's.
        """
        return state_dicts.float32_value(Engine(self), param)

    def float32_state(self, param: Tensor) -> dict[str, Any]:
        """Returns a new dict with a parameter's state, in which coded entries are float32 tensors of its shape.

        Code that appends, cuts or permutes a parameter's rows may edit the tensors of its shape, and keep the dict as
        `optimizer.state[param]`. The next step converts it to the group's storage format. Other entries are as in the
        state: counters, and the `param_remainder`, `param_compensation` or `param_master` of a 16-bit parameter, which
        has the parameter's shape. The dict is empty before the parameter's first step.

        Raises:
            KeyError: The parameter is not this optimizer's.
            TypeError: An entry for codes holds something else.
        """
        return state_dicts.float32_state(Engine(self), param)

    def report(self) -> Report:
        """Reports memory per parameter, bytes moved by a step, rounding losses, and clipped and skipped steps.

        Print the report or read its attributes. It works at any time. Before the first step, and after `zero_grad()`,
        it gives expected sizes. The share of updates lost to rounding needs gradients: the report steps copies of the
        16-bit parameters, one at a time. Measuring the memory bandwidth takes a few hundred milliseconds.
        """
        with twins.on_host(self, with_gradients=True), pieces.in_place(self, with_gradients=True):
            return report_of(Engine(self))

    def statistics(self, every: int = 10, model: nn.Module | None = None) -> Statistics:
        """Measures gradients, updates and rounding of each parameter in every so many steps, from the next one on.

        The step measures values while it updates them, without another pass over memory. Parameters and states keep the
        bits of a step without it. With step_in_backward() a backward measures whose following step() is due. A skipped
        step does not count. On CUDA no step waits for the figures, but reading `latest` does. Each rank measures its
        own part of DTensors and of parameters under shard=. Sparse gradients are not measured. Neither state_dict() nor
        copies of the optimizer contain it.

        Args:
            every: Steps from one that measures to the next. 1 measures all.
            model: Names the parameters. None takes the names that the optimizer was given, else positions. A
                DistributedDataParallel of drivetrain also measures the gradient noise scale; every rank must call this.

        Returns:
            An object with `latest`, `arrived` and `remove()`, which also ends as a context manager.

        Raises:
            ValueError: every is no number of steps.
            RuntimeError: statistics() is active already.
            NotImplementedError: A parameter is on a device other than the CPU and CUDA, or on CUDA under Muon or
                `offload`. Or torch's class steps the parameters.
        """
        return begin(Engine(self), every, model)

    @option
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to, or None for no clipping."""
        return kept_of(self).max_grad_norm

    @option
    def zero_grads_in_step(self) -> bool:
        """True if the step leaves zeros in every `.grad`."""
        return kept_of(self).zero_grads_in_step

    @extra
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients, unscaled and before clipping. None if the step did not need it.

        Reading it on CUDA waits for the device; after the replay of a captured step it is the replay's norm.
        """
        return kept_of(self).grad_norm

    @extra
    def last_step_skipped(self) -> bool:
        """True if the last step() changed nothing because a gradient was not finite.

        Reading it on CUDA waits for the device; after the replay of a captured step it describes the replay.
        """
        result = kept_of(self).result
        return result is not None and result.skipped

    @extra
    def in_backward(self) -> StepInBackward | None:
        """The result of step_in_backward(), until it is removed."""
        return kept_of(self).in_backward

    @extra
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch's GradScaler and by frameworks, as of torch's fused classes."""
        return Engine(self).announces_scaling


@_disable_dynamo
def _step_outside_the_graph(optimizer: FusedOptimizer, closure: Callable[[], float] | None) -> float | None:
    return step.step(Engine(optimizer), closure)
