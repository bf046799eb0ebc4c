"""What every optimizer here shares: torch's Optimizer contract around one native step."""

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .. import _C
from . import precision, sharded, sparse
from .arguments import check_max_grad_norm
from .in_backward import WHY_NOT_CLIPPED, StepInBackward
from .mesh_sums import MeshSums
from .report import Counts, Report, report_of

# Hyper-parameters that older state dicts of torch's classes lack, and those by which another class' state is known.
_MAY_BE_ABSENT = {
    "capturable",
    "centered",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "momentum",
    "nesterov",
}
_FOREIGN = {"alpha", "amsgrad", "betas", "centered", "dampening", "eps", "initial_accumulator_value", "lr_decay"}

# Classes that stand under the name of one of torch's (drivetrain.install(optim=True)), and that one.
in_place_of: dict[type, type] = {}

# A description of every optimizer made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []


class FusedOptimizer(torch.optim.Optimizer):
    """Mix-in placed before a torch.optim class: keeps its constructor, state and checks, and replaces its step.

    Every class takes keyword arguments beside torch's. Two change what a step does with gradients; they, and a
    GradScaler's unscaling, cost no pass of their own over parameters or state: gradients are read once for the norm
    where one is asked for, and once for the step.

    * max_grad_norm: clips the 2-norm of all gradients of the optimizer together, as torch.nn.utils.clip_grad_norm_
      does; inf only measures it. A step whose gradients are not all finite is left out, with a warning.
    * zero_grads_in_step: leaves zeros in every `.grad` instead of calling zero_grad(set_to_none=False) later. On CUDA
      prefer zero_grad(), which sets gradients to None: backward then hands them over, and need not add them to zeros
      that it keeps (on an H100 that addition takes 1 ms and 0.47 GiB per step of GPT-2 124M).

    Both are attributes too, and may be changed between steps. Otherwise `.grad` holds what the step used, unscaled and
    clipped, as after torch's own functions. `grad_scale` and `found_inf` are read from attributes of that name, as
    torch's fused optimizers read them: gradients are divided by the one, nothing is updated where the other is above 0.

    On CUDA step() never waits for the device, and all of this is worked out there: `grad_norm` and `last_step_skipped`
    wait for it when they are read, a step that is left out gives no warning, and the states that a first step makes
    are there even if it was left out (of the rules only SGD's dampening notices: its first gradient then counts less).
    Only a number other than the learning rate (`betas`, say) that is a tensor on CUDA makes step() wait, as in torch:
    the host reads it.
    The step counters of parameters on CUDA are there too, in float32, as torch's fused optimizers keep them; loading a
    state moves them to where their parameter is. So a step may be captured into a CUDA graph, with any storage, once a
    step outside of it has made the states; with a learning rate in a tensor on the device, replays follow it.
    `capturable` changes nothing.

    Four say how parameters and states live in memory; each may also be a key of a parameter group, and may change
    between steps. The arithmetic is in float32 whatever they say.

    * state_bits: 32 (float32), 16 (bfloat16) or 8 (blocks of 256 values with a float32 scale each); None: as torch
      has it, in the parameter's dtype. Parameters of one dimension or fewer than `min_8bit_size` elements keep
      float32 instead of 8 bits.
    * master_bits: 32 or 24 bits of precision for 16-bit parameters; None: those that they have. A bfloat16 parameter
      becomes the leading half of its float32 value (rounded, ties away from zero), and the state keeps the remainder:
      `param_remainder`, int16 (nothing is lost) or int8. A float16 parameter is a copy of a float32 in the state,
      `param_master`; only 32 there.
    * rounding, of 16-bit parameters without a master: "nearest"; "stochastic", up as often as the value is near it
      (bits from the parameter's place, the step and the element's number: the same on every rank, in every run);
      "kahan", with what was left out kept in the state in the parameter's dtype, `param_compensation`.

    DTensor parameters (fully_shard(), tensor parallel plans, HSDP) are stepped by each rank for its own part, with the
    bits of a step of the whole parameter, and without communication unless the step needs a norm. States are DTensors
    of the parameter's placements, as torch's classes leave them, and torch.distributed.checkpoint.state_dict saves and
    loads them on any number of ranks. Three things go by the part and not by the whole: the blocks of 8-bit states,
    which are plain tensors of this rank in `state`; `min_8bit_size`; and the element's number in stochastic rounding.
    `max_grad_norm` clips the norm over all ranks' parts, each distinct one counted once; gradients of other placements
    than their parameter's, partial sums say, are given those, in `.grad`. LAMB's norms, and what Adafactor averages,
    are summed over the ranks; Muon's matrices are gathered, one at a time.

    A subclass says which native rule a group follows (`_rule`) and which numbers that rule reads (`_hypers`). The
    arithmetic, and the names of each rule's states, are in csrc/optim/rules.h.
    """

    # Set, and deleted, by whoever scales the loss; not there otherwise.
    grad_scale: float | Tensor
    found_inf: float | Tensor

    zero_grads_in_step: bool = False
    _can_scale_in_step: bool  # whether all gradients are on one device, as a step that unscales needs them
    _step_supports_amp_scaling: bool  # read by torch's GradScaler and by frameworks
    _max_grad_norm: float | None = None
    _result: _C.StepResult | sharded.Measured | None = None  # of the last step
    _shards: sharded.Shards | None = None  # None: no parameter was a DTensor yet
    _precision: Mapping[str, Any] = MappingProxyType({})  # what the constructor was given of precision.DEFAULTS
    _loading: dict[str, Any] | None = None  # the state dict that load_state_dict is about
    _reader: _C.StepReader | None = None
    in_backward: StepInBackward | None = None  # what step_in_backward() returned, until that is removed
    _may_be_sparse: bool = False  # whether a gradient was sparse before
    # Steps parameters with sparse gradients, given their group and them; None: torch's class takes no such gradients.
    _step_sparse: Callable[[dict[str, Any], list[Tensor]], None] | None = None
    _overflow_flag: Tensor | None = None  # where drivetrain.amp.GradScaler wants to be told of the next step's

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: int | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
        **kwargs: Any,
    ) -> None:
        refuse_unsupported(type(self).__name__, kwargs)
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
        # Groups without any are as torch's, key by key.
        self._precision = {option: value for option, value in asked.items() if value != precision.DEFAULTS[option]}
        super().__init__(*args, **kwargs)
        if type(self) in in_place_of.values():  # see _stay_torchs
            return
        self._place_step_counters()
        self._find_devices()
        count, num_groups = sum(len(group["params"]) for group in self.param_groups), len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        constructed.append(f"{type(self).__name__} ({count} parameters in {groups})")

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to; None: they are not."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(value)
        if value is not None and self.in_backward is not None:
            raise NotImplementedError(f"max_grad_norm is {value}, but {WHY_NOT_CLIPPED}")
        self._max_grad_norm = value
        if hasattr(self, "_can_scale_in_step"):  # else the constructor comes to it
            self._announce_scaling()

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients, unscaled and before clipping; None: it was not asked for.

        On CUDA waits for the device; after a replay of a captured step, of that.
        """
        return None if self._result is None else self._result.grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step() left everything as it was because a gradient was not finite.

        On CUDA waits for the device; after a replay of a captured step, of that.
        """
        return self._result is not None and self._result.skipped

    @property
    def is_on_cpu(self) -> bool:
        """Whether all parameters are on the CPU."""
        return all(param.device.type == "cpu" for group in self.param_groups for param in group["params"])

    def _find_devices(self) -> None:
        """Looks where the parameters are, once per change of the groups: it takes time for each of them."""
        self._can_scale_in_step = len({param.device for group in self.param_groups for param in group["params"]}) <= 1
        self._announce_scaling()

    def _announce_scaling(self, *, by_our_scaler: bool = False) -> None:
        """Tells a GradScaler whether to leave unscaling to the step.

        torch's classes do so with fused=True alone. Frameworks refuse to clip the gradients of an optimizer that does,
        and step pre-hooks then see scaled gradients. So plain optimizers must not, although the step could.
        """
        is_asked = by_our_scaler or self.max_grad_norm is not None or bool(self.defaults.get("fused"))
        self._step_supports_amp_scaling = is_asked and self._can_scale_in_step

    def _rule(self, group: dict[str, Any]) -> str:
        """The native rule for this group, by its name in csrc/optim/rules.h."""
        raise NotImplementedError

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        """The group's numbers, by the names that the native rule reads; a learning rate on CUDA stays there."""
        raise NotImplementedError

    def _gathers(self, param: Any) -> bool:
        """Whether the rule steps the whole of a DTensor that is split between ranks; else each rank its part."""
        return False

    def _initial_value(self, group: dict[str, Any]) -> float:
        """Every value of a state before the first step."""
        return 0.0

    def _complete_states(
        self,
        params: Sequence[tuple[Tensor, dict[str, Any], str]],
        rule: str,
        states: dict[Tensor, Any],
        written: list[tuple[Tensor, str, Any]],
    ) -> list[Tensor]:
        """Makes what the state of parameters (each with its group and label) lacks, with torch's names, and converts
        what lives otherwise than the group asks for: all in one pass per device, for which the host does not wait.

        Args:
            states: of all parameters, by parameter.
            written: gets the parameters with the names of what was written or taken out ("": the parameter itself),
                and what had been there, or None.

        Returns:
            the parameters that had lacked a state of the rule: this is their first step.
        """
        fresh = []
        conversions = _C.Conversions()
        precisions = {id(group): precision.of(group) for _, group, _ in params}

        def write(param: Tensor, entries: dict[str, Tensor | None]) -> None:
            state = states[param]
            for name, value in entries.items():
                if value is None and name not in state:
                    continue
                written.append((param, name, state.get(name)))
                if value is None:
                    del state[name]
                else:
                    state[name] = value

        def round_anew(param: Tensor, group: dict[str, Any], label: str) -> None:
            state = states[param]
            # Only where something else was beside it may its own bits change, too.
            had_extra = any(name in state for name in precision.EXTRA_NAMES)
            before = param.detach().clone() if had_extra else None
            entries = precision.extra_as_asked(state, param, precisions[id(group)], label, conversions)
            if entries and before is not None:
                written.append((param, "", before))
            write(param, entries)

        # float32, as torch keeps it by default (float64 where that is the default dtype).
        step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        # Name by name, so that the steps to come find each name's tensors side by side in memory.
        for param, group, _ in params:
            if states[param].get("step") is None and _C.optim_counts_steps(rule, precisions[id(group)]):
                write(param, {"step": conversions.new_counter(_counter_device(param), step_dtype)})
        for name, kind in _C.optim_states(rule):
            for param, group, label in params:
                state, initial = states[param], self._initial_value(group)
                entries = precision.state_as_asked(
                    state, name, kind, param, precisions[id(group)], label, initial, conversions
                )
                if entries and not precision.has_state(state, name):
                    fresh.append(param)
                write(param, entries)
        for param, group, label in params:
            round_anew(param, group, label)
        conversions.run()
        return fresh

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            TypeError: a gradient's or state's dtype, or a state's shape, does not fit its parameter, or that was cast
                since the last step; the message names the parameter. A hyper-parameter is no number.
            ValueError: a gradient's shape or device does not fit its parameter; two parameters, or the gradients of
                two where the step writes them, share memory; a group lacks a hyper-parameter, or has one out of range.
            RuntimeError: a gradient is sparse, and the rule is not SGD's or Adagrad's; the first step, which makes
                states, is captured into a CUDA graph.
            NotImplementedError: the parameters are on a device for which this build has no kernels, or on several
                where max_grad_norm or a GradScaler needs them on one, or are tensor subclasses that wrap others
                (but DTensors).
            ValueError: the environment variable DRIVETRAIN_ISA names no instruction set of this processor.
            In every case no parameter, no state and no step counter has changed.
        """
        if torch.compiler.is_compiling():
            return self._step_outside_the_graph(closure)
        return self._step(closure)

    @_disable_dynamo
    def _step_outside_the_graph(self, closure: Callable[[], float] | None) -> float | None:
        return self._step(closure)

    def step_in_backward(
        self, model: nn.Module, *, clip_by_previous_norm: float | None = None, bucket_cap_mb: float = 25.0
    ) -> StepInBackward:
        """Lets backward step the model's parameters, each as soon as its gradient is there, and free that.

        So gradients take the memory of one bucket at a time, not of the whole model: with bfloat16 parameters,
        `master_bits=24` and `state_bits=8` all that is kept takes 5 bytes per parameter. Under drivetrain's
        DistributedDataParallel a bucket is stepped once it is reduced, while backward and other reductions go on, and
        buckets share the memory of a few (not with find_unused_parameters, a static graph or main_grads(), where the
        arena stays as it is); every rank must call this, between backwards.

        The loop may stay as it is, but for clipping, which must go: there is nothing to clip after backward. `step()`
        then steps what backward has left, of parameters that are not the model's for example; hooks on steps, and what
        a scheduler counts, belong to it still. `zero_grad()` finds nothing. Learning rates are those of the time of
        backward. To accumulate micro-batches, run all but the last backward under the returned object's `no_step()`, or
        all of them in drivetrain.accumulate(); a backward that steps adds its gradients to what is there and steps with
        the sum.

        What this cannot be: an exception inside backward leaves those parameters stepped whose turn had come. Gradients
        that are not finite are stepped with. A parameter whose gradient comes in several parts in one backward
        (reentrant activation checkpointing around it twice) would be stepped with each. Only one thread's backward may
        step. `max_grad_norm` and GradScaler need all gradients before the first is used, and raise; a scaler when it is
        told to step, after the first backward has used gradients that were scaled.

        Args:
            model: some of its parameters are this optimizer's. Wrap it into DistributedDataParallel first.
            clip_by_previous_norm: a norm: the gradients of a backward are scaled as if their own norm were that of the
                backward before (the first are not scaled). Not what torch.nn.utils.clip_grad_norm_ does: a sudden spike
                passes, and the step after it is clipped. Not with reentrant activation checkpointing.
            bucket_cap_mb: MiB of gradients that are collected before a step; DistributedDataParallel has its own.

        Returns:
            an object with `no_step()`, `remove()` and, with clip_by_previous_norm, `grad_norm`.

        Raises:
            NotImplementedError: max_grad_norm is set; the model is wrapped into another parallel class; a parameter is
                a DTensor.
            TypeError: model is no module.
            ValueError: clip_by_previous_norm or bucket_cap_mb is not above 0; none of the model's parameters is the
                optimizer's.
            RuntimeError: backward steps already; a DistributedDataParallel that is not in the model reduces some of the
                parameters (found in backward, if it wraps them later).
        """
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
                f"drivetrain.optim.{type(self).__name__}: a GradScaler looks at all gradients before the first is "
                "used, and after step_in_backward() backward has used them, scaled as they were: train in bfloat16 "
                "without a scaler, or leave step_in_backward() out."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reader is None:  # copies and pickles come without one
            self._reader = _C.StepReader()
        begin = time.perf_counter()
        result = self._step_all(self._reader, self._options(overflow_flag))
        self._result = result
        counts: Counts = self.__dict__.setdefault("_counts", Counts())  # copies and pickles come without any
        seconds = time.perf_counter() - begin
        if result.is_on_device:  # to look is to wait
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

    def _step_all(self, reader: _C.StepReader, options: _C.StepOptions) -> _C.StepResult | sharded.Measured:
        """Steps dense gradients natively, and sparse ones by torch's functions where torch's class takes them."""
        if not self._may_be_sparse:
            try:
                return self.step_groups(self.param_groups, reader, options)
            except RuntimeError:
                # Nothing has changed. Looking for sparse gradients in every step would take time for each parameter.
                if self._step_sparse is None or not sparse.has_any(self.param_groups):
                    raise
                self._may_be_sparse = True
        assert self._step_sparse is not None
        dense_groups, sparse_groups = sparse.split(self.param_groups, sharded.label_of)
        is_any_sparse = any(group["params"] for group in sparse_groups)
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if is_any_sparse and (options.max_grad_norm is not None or options.check_finite or scaled):
            raise NotImplementedError(
                f"drivetrain.optim.{type(self).__name__}: a gradient is sparse, which neither max_grad_norm nor an "
                "unscaling step takes: leave max_grad_norm and fused=True out, and use torch.amp.GradScaler."
            )
        result = self.step_groups(dense_groups, reader, options)
        with torch.no_grad():
            for group in sparse_groups:
                if group["params"]:
                    self._step_sparse(group, group["params"])
                for param in group["params"] if self.zero_grads_in_step else []:
                    param.grad.zero_()
        return result

    @torch.no_grad()
    def step_groups(
        self, groups: list[dict[str, Any]], reader: _C.StepReader, options: _C.StepOptions
    ) -> _C.StepResult | sharded.Measured:
        """The step of `groups`, which are this optimizer's, or copies with some of their parameters.

        Args:
            reader: is quick to read again what it has read last, so best one for the same parameters each time.
        """

        def run(
            plain_groups: list[dict[str, Any]], state: dict[Tensor, Any], treatment: _C.StepOptions
        ) -> tuple[_C.StepResult, bool]:
            return self._step_plain(plain_groups, state, reader, treatment)

        if self._shards is None:
            result, _ = run(groups, self.state, options)
            if not result.has_wrappers:
                return result
            self._shards = sharded.Shards()
        sums = functools.partial(MeshSums, hypers=self._hypers)
        return self._shards.step(groups, self.state, options, self._gathers, sums, run)

    def _step_plain(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, Any],
        reader: _C.StepReader,
        options: _C.StepOptions,
    ) -> tuple[_C.StepResult, bool]:
        """The step of parameters that are plain tensors; of others nothing happens, and the result says so.

        Returns:
            the result, and whether states were made, converted or taken out for it.
        """
        asked = [self._asked_by(group, index) for index, group in enumerate(groups)]
        rules, precisions, hypers = [list(column) for column in zip(*asked, strict=True)]

        def run(fresh: list[Tensor]) -> _C.StepResult:
            return _C.optim_step(reader, groups, rules, hypers, precisions, state, fresh, options)

        result = run([])
        if result.has_wrappers or not result.missing:
            return result, False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"drivetrain.optim.{type(self).__name__}: {result.missing[0][2]} has no state yet, and every "
                "replay of a CUDA graph would make it anew: call step() once before the capture."
            )
        written: list[tuple[Tensor, str, Any]] = []
        fresh: list[Tensor] = []
        skipped = True
        try:
            for rule in dict.fromkeys(rules):
                lacking = [(p, groups[i], label) for p, i, label in result.missing if rules[i] == rule]
                fresh += self._complete_states(lacking, rule, state, written)
            result = run(fresh)
            skipped = not result.is_on_device and result.skipped
        finally:
            if skipped:  # a first step is yet to come
                _take_back(state, written)
        assert not result.missing, "what was made is not what the step asks for"
        return result, not skipped

    def _asked_by(self, group: dict[str, Any], index: int) -> tuple[str, _C.Precision, dict[str, float | Tensor]]:
        """What a group asks of the native step: rule, storages and numbers, which that checks for their range."""
        try:
            return self._rule(group), precision.of(group), self._hypers(group)
        except KeyError as missing:
            raise ValueError(f"param_groups[{index}] has no {missing}, which {type(self).__name__} needs") from missing
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"param_groups[{index}]: {error}") from error

    def _options(self, overflow_flag: Tensor | None) -> _C.StepOptions:
        scale, found_inf = self._scalar("grad_scale", 1.0), self._scalar("found_inf", 0.0)
        # Infinity is what a scaler's scale may grow to; the gradients are then found not to be finite.
        if isinstance(scale, float) and not scale > 0 and not (isinstance(found_inf, float) and found_inf):
            raise ValueError(f"grad_scale is {scale}, expected a number above 0: gradients are divided by it")
        return _C.StepOptions(
            grad_scale=scale,
            found_inf=found_inf,
            max_grad_norm=self.max_grad_norm,
            check_finite=overflow_flag is not None,
            zero_grads=self.zero_grads_in_step,
            overflow=overflow_flag if overflow_flag is not None and overflow_flag.is_cuda else None,
        )

    def _scalar(self, name: str, default: float) -> float | Tensor:
        """The attribute of that name, left on the device where the parameters are on it too."""
        value = getattr(self, name, None)
        if isinstance(value, Tensor) and value.is_cuda and not self.is_on_cpu:
            return value.detach()
        return default if value is None else float(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses the options that the constructor refuses.

        Raises:
            NotImplementedError: the group sets `differentiable`, or has a DTensor that the rule cannot step: one that
                is a sum yet to be reduced; one that it gathers, in a storage that only parts can have.
            ValueError: an option or a hyper-parameter of the group is out of range, or not finite.
            TypeError: a hyper-parameter is no number, or the group is no dict.
            In every case the optimizer has the groups that it had.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")  # torch's words
        refuse_unsupported(type(self).__name__, param_group)
        for option, value in self._precision.items():
            param_group.setdefault(option, value)
        precision.check(param_group)
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            for place, param in enumerate(self.param_groups[index]["params"]):
                if (reason := sharded.why_not(param, self.param_groups[index], self._gathers)) is not None:
                    self._stay_torchs(f"{sharded.label_of(self.param_groups[index], index, place)} {reason}.")
                    return
            _C.optim_check_hypers(self._asked_by(self.param_groups[index], index)[2], index)
        except (NotImplementedError, TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._find_devices()

    def _stay_torchs(self, reason: str) -> None:
        """Becomes one of torch's class, in whose place this one was made: code that asked for that gets it.

        Raises:
            NotImplementedError: with the reason, where this class was asked for, or has been stepped.
        """
        original = in_place_of.get(type(self))
        has_options = self.max_grad_norm is not None or self.zero_grads_in_step or bool(self._precision)
        if original is None or has_options or self._result is not None:
            raise NotImplementedError(reason)
        warnings.warn(f"torch.optim.{original.__name__} is torch's here: {reason}", stacklevel=2)
        self.__class__ = original
        self._step_supports_amp_scaling = bool(self.defaults.get("fused"))
        self._patch_step_function()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_max_grad_norm", "zero_grads_in_step", "_precision")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes torch's state, whichever of its implementations wrote it: step counters go to their place."""
        super().__setstate__(state)
        self._reader = None  # what it knows of the last step is not about these states
        self._find_devices()
        for group in self.param_groups:
            for option, value in self._precision.items():
                group.setdefault(option, value)
        if self._loading is not None:
            self._keep_dtypes(self._loading)
        self._place_step_counters()

    def _place_step_counters(self) -> None:
        """Moves step counters to where the step reads them: torch's Adagrad makes them on the CPU at construction, and
        its state dicts have them there."""
        for param, values in self.state.items():
            step, device = values.get("step"), _counter_device(param)
            if isinstance(step, Tensor) and (step.device != device or not step.is_floating_point()):
                values["step"] = step.detach().to(device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, save that every state keeps the dtype in which it was saved (torch casts it to the parameter's).

        States are converted to what their group asks for in the next step: those of torch's own class to 8 bits where
        the group has state_bits=8, for example. As in torch, a group's options are those that were saved.

        Raises:
            ValueError: as torch, where the groups do not fit; an option of a saved group is out of range; the state is
                another optimizer's, or was written by a newer version of drivetrain with storages of its own.
            In every case the optimizer has the groups and states that it had.
        """

        def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_loaded(loaded)
            self._loading = loaded

        before = self.state, self.param_groups
        handle = self.register_load_state_dict_pre_hook(remember)  # after those of users, which may replace the dict
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.state, self.param_groups = before
            raise
        finally:
            handle.remove()
            self._loading = None

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises ValueError for what torch's loading would take and a later step would stumble over."""
        name = type(self).__name__
        for index, group in enumerate(loaded["param_groups"]):
            where = f"param_groups[{index}] of the state dict"
            version = group.get(precision.VERSION_NAME, 0)
            if version > precision.VERSION:
                raise ValueError(
                    f"{where} was written by a newer drivetrain: its storages are of version {version}, and this "
                    f"drivetrain reads up to {precision.VERSION}. Upgrade it, or save torch_state_dict() there."
                )
            lacking = [key for key in self.defaults if key not in group and key not in _MAY_BE_ABSENT]
            foreign = sorted(_FOREIGN & group.keys() - self.defaults.keys())
            if lacking or foreign:
                what = f"has no {', '.join(lacking)}" if lacking else f"has {', '.join(foreign)}"
                raise ValueError(f"{where} {what}: it is the state of another optimizer than {name}")
            precision.check({key: value for key, value in group.items() if key in precision.DEFAULTS}, where)
            rule = self._rule({**self.defaults, **group})
            for place, key in enumerate(group["params"]):
                state = loaded["state"].get(key)
                if state and "step" not in state and _C.optim_counts_steps(rule, precision.of({})):
                    raise ValueError(f"parameter {place} of {where}: its state has no 'step', which {name} needs")

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a group with options of ours has the version of their storages, too. 8-bit states of DTensors are
        float32 DTensors in it: their blocks are cut out of a rank's part, and another number of ranks has other parts.
        Loaded, the next step makes 8 bits of them, the same where the parts are.
        """
        result = super().state_dict()
        params = self._params_by_key(result)
        result["state"] = {key: sharded.portable(params.get(key), state) for key, state in result["state"].items()}
        for group in result["param_groups"]:
            group.pop(precision.VERSION_NAME, None)
            if precision.DEFAULTS.keys() & group.keys():
                group[precision.VERSION_NAME] = precision.VERSION
        return result

    def _keep_dtypes(self, saved: dict[str, Any]) -> None:
        for saved_group, group in zip(saved["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                for name, value in saved["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[param][name] = value.to(param.device)

    def _params_by_key(self, state_dict: dict[str, Any]) -> dict[Any, Tensor]:
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        return dict(zip(keys, params, strict=True))

    def torch_state_dict(self) -> dict[str, Any]:
        """state_dict() as torch's own class has it: compressed states as float32 tensors, step counters on the CPU
        unless the group says `fused` or `capturable`, without what is ours alone.

        The way back is load_state_dict(). What a master keeps beyond its parameter is not part of torch's state: see
        float32_value().
        """
        result = self.state_dict()
        params_by_key = self._params_by_key(result)
        result["state"] = {key: precision.plain(state, params_by_key[key]) for key, state in result["state"].items()}
        for group in result["param_groups"]:
            if not (group.get("fused") or group.get("capturable")):
                for key in group["params"]:
                    state = result["state"].get(key, {})
                    if isinstance(state.get("step"), Tensor):
                        state["step"] = state["step"].cpu()
        result["param_groups"] = [
            {option: value for option, value in group.items() if option not in precision.NAMES}
            for group in result["param_groups"]
        ]
        return result

    def report(self) -> Report:
        """What the optimizer keeps, moves and loses: bytes per parameter, bytes moved by a step and its share of the
        memory's bandwidth, updates lost to rounding, steps clipped and left out. Print it, or read its attributes.

        Works at any time. Before the first step, and after `zero_grad()`, it gives expected sizes.
        Updates lost to rounding need gradients: the report makes a step on copies of 16-bit parameters, one at a time.
        It measures the bandwidth, too, which takes some hundred milliseconds.
        """
        return report_of(self, self.__dict__.get("_counts", Counts()))

    def float32_value(self, param: Tensor) -> Tensor:
        """A parameter's value as a new float32 tensor of its shape: with what a master, a remainder or a compensation
        keeps beside it, where the optimizer has one.

        Raises:
            KeyError: the parameter is not this optimizer's.
        """
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                values = sharded.local_values(param, self.state.get(param, {}))
                value = precision.float32_value(values, sharded.local_part(param), group)
                return sharded.as_shard_of(param, value) if sharded.is_dtensor(param) else value
        raise KeyError(f"a parameter of shape {tuple(param.shape)} that is not in this optimizer's param_groups")


def _take_back(states: dict[Tensor, Any], written: list[tuple[Tensor, str, Any]]) -> None:
    for param, name, before in reversed(written):
        if not name:
            param.detach().copy_(before)
        elif before is None:
            states[param].pop(name, None)
        else:
            states[param][name] = before
        if not states[param]:
            del states[param]


def learning_rate(group: dict[str, Any]) -> float | Tensor:
    """The group's `lr` as a number, or where it is: on CUDA, for the step to read there."""
    lr = group["lr"]
    return lr.detach() if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


def _counter_device(param: Any) -> torch.device:
    """Where the step counter of a parameter is kept: beside it on CUDA, else on the CPU."""
    return param.device if isinstance(param, Tensor) and param.is_cuda else torch.device("cpu")


def refuse_unsupported(name: str, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for torch's constructor options that would otherwise be ignored in silence.

    `foreach` and `fused` choose between torch's implementations; ours is always fused, so they change nothing. Nor does
    `capturable`: on CUDA every step is.
    """
    if options.get("differentiable"):
        raise NotImplementedError(
            f"drivetrain.optim.{name} does not support differentiable=True: use torch.optim.{name} to differentiate "
            "through the step"
        )
