"""DistributedDataParallel: torch's class over drivetrain's own reducer and flat gradient buffer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from ..grad import main_grads
from . import hang_reports, parameter_names, sharding
from . import transport as transports
from .bucket_plan import BucketPlan, bucket_caps, describe_plan, first_caps_of_torch, obstacle_to_planning
from .consistency import (
    check_default_group,
    check_devices,
    check_same_on_all_ranks,
    checked_weight,
    names_by_id,
    title_of,
    trained_parameters,
)
from .defaults import constructed, defaults, with_defaults
from .groups import ReducesOverGroups, left_out, parts_of
from .logger import Logger
from .logical_ranks import parts as logical
from .reducer import Reducer, announce
from .values import SkippedSteps, check_values, checked_mode, set_gradient_check

__all__ = ["DistributedDataParallel", "checked_weight", "defaults"]

_TORCH_ARGUMENTS = inspect.signature(TorchDistributedDataParallel.__init__).parameters
# All ranks must agree on these arguments.
_SAME_EVERYWHERE = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",
    "check_replicas_every",
    "check_gradients",
    "spike_factor",
    "overlap_gather",
    "logical_ranks",
)


class DistributedDataParallel(ReducesOverGroups):
    """torch.nn.parallel.DistributedDataParallel over drivetrain's own reducer.

    Gradients live in one flat buffer in bucket order. After a backward pass each `.grad` is a view of it and holds the
    mean over ranks. Buckets are all-reduced while the backward pass runs. A tensor that a script keeps over a `.grad`,
    such as `p.grad.flatten()`, gets its own memory before the next gradient is written. Arrays made by `.numpy()` do
    not; copy them. A tensor that a script assigns to `.grad` and refers to stays `.grad`, and gets the mean. So does a
    view of a tensor that the script keeps.

    A backward pass through this wrapper's outputs and outside `no_sync()` ends with the mean over ranks in `.grad`, or
    raises. This includes a second backward pass, and one whose forward pass ran under `no_sync()`. Every other backward
    pass stays on its rank, as under torch: through `module`, for example, or of a penalty on parameters. A hook that
    consumes a gradient before its reduction raises an error that names the parameter.

    Args:
        module: The module to train.
        device_ids: None, or the one CUDA device of the module.
        output_device: Accepted as under torch.
        dim: Accepted as under torch.
        broadcast_buffers: Broadcasts rank 0's buffers before a forward pass. None means True.
        init_sync: Broadcasts rank 0's parameters and buffers at construction and compares the ranks' arguments.
        process_group: Process group for gradients and buffers. None takes the default group.
        bucket_cap_mb: Size of a bucket in MiB. None begins with 25 and then plans buckets from measured times.
        find_unused_parameters: Allows parameters that take no part in a forward pass.
        check_reduction: Deprecated by torch, without effect.
        gradient_as_bucket_view: True permits the next backward pass to overwrite tensors kept over a `.grad`.
        static_graph: Promises that every step uses the same parameters.
        delay_all_reduce_named_params: Parameters whose all-reduce is delayed, as under torch.
        param_to_hook_all_reduce: Parameter whose gradient starts the delayed all-reduce.
        mixed_precision: torch's policy for parameters and gradients of fewer bits.
        device_mesh: One-dimensional mesh, in place of `process_group`.
        skip_all_reduce_unused_params: Skips buckets that no rank uses.
        bucket_cap_mb_list: Sizes of the first buckets in MiB.
        batched_grad_copy: Accepted, without effect: gradients are views.
        forward_sync_buffers: If True, a forward pass synchronizes buffers, in releases of torch that know it.
        transport: Carrier of the gradients. "torch" is the process group. "shm" is shared memory between the CPU ranks
            of a host. "nccl" is a separate NCCL communicator with registered memory. "auto" takes the environment
            variable DRIVETRAIN_TRANSPORT if it is set. Otherwise it takes "shm" for CPU parameters over gloo where
            ranks share a host, else "torch".
        check_replicas_every: Number of synchronized backward passes between comparisons of a checksum of all
            parameters over ranks. 0 compares never.
        report_hang_after: Seconds of waiting after which a warning names the missing ranks and where they were last
            seen, or three times the longest wait before. None reads DRIVETRAIN_REPORT_HANG_AFTER, or takes 8; 0
            disables it. On CUDA a stream waits instead of the host: a group is aborted after this time if another
            rank's process has ended.
        wire_dtype: torch.bfloat16, torch.float8_e5m2 or its name: float32 and complex64 gradients travel between hosts
            in that dtype and are summed in float32. Every rank gets the same bits. float8 adds what it rounds off to
            the next step's gradients. Requires gloo on the CPU and no communication hook.
        check_gradients: "raise" or "skip": checks each bucket before its reduction for nan and inf. Every rank raises
            an error that names rank and parameter, or leaves each `.grad` None, which makes optimizers do nothing.
        spike_factor: With check_gradients, also finds a bucket whose norm exceeds the median of its last 32 norms by
            this factor. It needs the CPU and eight earlier steps. 0 finds none.
        shard: "optimizer" divides optimizer states among ranks: each rank steps its rows of every parameter, and the
            ranks gather the parameters before `step()` returns. "gradients" also divides reduced gradients. `.grad` is
            then a DTensor that holds this rank's rows, and every backward pass reduces, also under `no_sync()`.
            docs/sharding.md says what else a script sees. None divides nothing.
        shard_group: The ranks that share one set of states, such as a host's ranks; other groups of ranks have their
            own set. None takes `process_group`.
        overlap_gather: With shard, `step()` returns before all parameters are gathered. Uses through the module wait
            for them. Before any other use, such as of a kept list of parameters, call `wait_for_parameters()`.
        expert_groups: Patterns of names, such as "experts.*", each with the group that reduces these parameters and
            buffers. Their `.grad` is the sum over that group, divided by the number of ranks in `process_group`.
        logical_ranks: Divides the global batch into that many parts, a power of two. Each number of ranks that divides
            it gets the same bits, also with `shard`. Train with `accumulate`; docs/logical-ranks.md says what
            else it needs.

    Raises:
        ValueError: No process group is initialized, parameters are on devices of several types, or the module is on
            the CPU and has a SyncBatchNorm or `device_ids`. Also for an unknown transport or wire_dtype, and a negative
            check_replicas_every or report_hang_after.
        RuntimeError: Nothing requires a gradient, or the ranks' parameters differ. Also if transport is "nccl" and a
            rank has no CUDA parameters or no NCCL; every rank raises and says which rank and why.
        TypeError: The installed torch does not know an argument that has another value than its default.
        NotImplementedError: wire_dtype with CUDA parameters, another backend than gloo, or reductions past the reducer.
            Also if shard or expert_groups does not go together with another argument, a parameter or its device.
    """

    logger: Logger

    @with_defaults
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str = "auto",
        check_replicas_every: int = 0,
        report_hang_after: float | None = None,
        wire_dtype: torch.dtype | str | None = None,
        check_gradients: str | None = None,
        spike_factor: float = 0.0,
        shard: str | None = None,
        shard_group: dist.ProcessGroup | None = None,
        overlap_gather: bool = False,
        expert_groups: Mapping[str, dist.ProcessGroup] | None = None,
        logical_ranks: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OUR_ARGUMENTS}
        changed = {name: value for name, value in given.items() if value is not _OUR_ARGUMENTS[name].default}
        for name, value in changed.items():
            is_ours = _OUR_ARGUMENTS[name].kind is inspect.Parameter.KEYWORD_ONLY or name == "batched_grad_copy"
            if not is_ours and name not in _TORCH_ARGUMENTS:
                raise TypeError(
                    f"torch {torch.__version__} does not know DistributedDataParallel's argument {name!r} (given "
                    f"{value!r}): leave it out, or upgrade torch."
                )
        check_values(changed)
        parts = parts_of(module, expert_groups, changed)
        self._shard, self._shard_group = shard, shard_group
        self._transport = transports.requested(transport)
        self._wire_dtype = transports.requested_wire_dtype(wire_dtype)
        self._logical_ranks = logical_ranks
        if delay_all_reduce_named_params is not None:
            transports.refuse_wire_dtype(self._wire_dtype, "delay_all_reduce_named_params")
        self._hooks_a_delayed_parameter = any(
            param is param_to_hook_all_reduce for _, param in delay_all_reduce_named_params or ()
        )
        self._report_hang_after = hang_reports.limit_from(report_hang_after)
        check_devices(trained_parameters(module))
        if process_group is None and device_mesh is None:
            check_default_group()
        self._check_replicas_every = check_replicas_every
        self._check_gradients = checked_mode(check_gradients, spike_factor)
        with left_out(module, parts):
            if init_sync and not any(is_lazy(param) for param in module.parameters()):  # torch refuses lazy ones itself
                arguments = {name: given[name] for name in _SAME_EVERYWHERE}
                arguments |= {"transport": self._transport, "report_hang_after": self._report_hang_after}
                arguments |= {"wire_dtype": self._wire_dtype, "shard": shard}
                group = device_mesh.get_group() if device_mesh is not None and device_mesh.ndim == 1 else process_group
                sizes = check_same_on_all_ranks(trained_parameters(module), arguments, group)
                changed |= {name: size for name, size in sizes.items() if size != given[name]}
            self._connects_now = init_sync or shard is not None
            super().__init__(**{name: value for name, value in changed.items() if name in _TORCH_ARGUMENTS})
        if self._use_python_reducer:  # torch's own Python hooks reduce, compiled into backward
            transports.refuse_wire_dtype(self._wire_dtype, "torch._dynamo.config.optimize_ddp = 'python_reducer'")
            self.reducer._remove_autograd_hooks()
        if not self._has_reducer():  # every all-reduce is delayed, and torch returned before these two lines
            self._lazy_init_ran = True
            if init_sync:
                _sync_module_states(self.module, self.process_group, self.broadcast_bucket_size, 0, set())
        self._sharding = sharding.of(self, overlaps=overlap_gather)
        self._wrap_parts(parts, changed)
        self._logical = logical.begin(self, logical_ranks)
        parameter_names.remember(module)
        size = sum(param.numel() for _, param in trained_parameters(module)) / 1e6
        count = len(self.reducer.buckets()) if self._has_reducer() else 0
        name = title_of(module)
        constructed.append(f"{name} ({size:.1f} M parameters, {count} {'bucket' if count == 1 else 'buckets'})")

    # torch reads this flag at forward only. The reducer also needs it at backward. It reduces a backward through this
    # wrapper's outputs if the flag is set when that begins, whatever it was at forward.
    @property
    def require_backward_grad_sync(self) -> bool:
        return bool(self.__dict__.get("_require_backward_grad_sync", True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.__dict__["_asks_for_sync"] = sync
        # No rank has memory for gradients of all rows, unless it collects them for a logical rank.
        sync = sync or (self.__dict__.get("_shard") == "gradients" and not self._logical_ranks)
        self.__dict__["_require_backward_grad_sync"] = sync
        if self._has_reducer():
            self.reducer.set_sync(sync)
        for part in self._parts():
            part.require_backward_grad_sync = sync

    # torch sets this when the first backward, synchronized or not, enqueues the callback that counts a static graph's
    # gradients. Our reducer needs that callback until they are counted.
    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        return self.reducer.is_graph_known()

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, enqueued: bool) -> None:
        pass

    # torch sets this in the forward that rebuilds the buckets. Ours are rebuilt when a backward begins, and torch's
    # hooks that step a ZeroRedundancyOptimizer need it from that backward on.
    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._has_reducer() and self.reducer.has_rebuilt_buckets()

    @_has_rebuilt_buckets.setter
    def _has_rebuilt_buckets(self, rebuilt: bool) -> None:
        pass

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduces `delay_all_reduce_named_params` once the gradient of `param_to_hook_all_reduce` has come.

        torch's version also reduces under no_sync(), and does not wait for the result before backward ends. It leaves
        out that gradient itself where it is a delayed one.
        """
        if not self.require_backward_grad_sync:
            return grad
        buffer = self._delay_grad_buffer
        assert buffer is not None

        def reduce() -> dist.Work:
            buffer.div_(dist.get_world_size(self.process_group))
            work: dist.Work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
            return work

        work = None if self._hooks_a_delayed_parameter else reduce()

        def finish() -> None:
            (work or reduce()).wait()

        torch.autograd.Variable._execution_engine.queue_callback(finish)
        return grad

    def backward(self, loss: torch.Tensor, weight: float | None = None, **kwargs: Any) -> None:
        """Runs `loss.backward()` with a weight: gradients become the mean over everything that the weights count.

        Pass a mean loss over a micro-batch, and its number of tokens or samples as weight. After the synchronized
        backward, `.grad` is the mean over all tokens of all ranks. This includes all micro-batches since the last
        synchronized backward if each got its weight here. Without weights, torch's mean of means overweights tokens of
        short batches.

        Every rank must give a weight in the same backwards. The loss is multiplied with it before backward. In float16
        large weights overflow: give them as shares of a usual batch. With weight 0 no backward runs and the loss, which
        may be nan as the mean of nothing, is not read. This rank still takes part in the reduction.

        Args:
            loss: As for `torch.Tensor.backward`.
            weight: Weight of this rank's micro-batch, finite and >= 0. None runs plain `loss.backward()`.
            **kwargs: For `torch.Tensor.backward`.

        Raises:
            ValueError: The weight is negative or not finite, or `.grad` holds gradients that no weight counts. Also if
                all ranks' weights sum to 0 (on every rank), and in `join()`.
            NotImplementedError: An optimizer runs inside backward, or `mixed_precision` is set.
        """
        if weight is None:
            loss.backward(**kwargs)
            return
        weight = checked_weight(weight)
        self.refuse_parts("backward() with a weight")
        logical.check_in_window(self)
        if self._join_config.enable:
            raise ValueError("weight does not go together with join(): ranks without inputs take no part in it")
        with sharding.weighted(self, weight):
            if weight > 0:
                (loss * weight).backward(**kwargs)
            elif self.require_backward_grad_sync:
                self.reducer.reduce_collected()

    def stragglers(self) -> list[float]:
        """Returns the seconds by which each rank delays the others in a step, to find the slow one.

        The rank that arrives last waits least. The delay of a rank is the longest wait over ranks minus its own. Its
        wait is the time per step that it waits for gradients and buffers: the median over the last 32 synchronized
        steps. Waits in other collectives, such as SyncBatchNorm's, do not count. No clock is compared between hosts,
        and no other rank need call this. Published waits are up to a quarter of `report_hang_after` old.

        Returns:
            Seconds for every rank of the process group; nan for a rank that has not yet published the wait of a step.

        Raises:
            RuntimeError: `report_hang_after` is 0, so that ranks publish nothing.
            NotImplementedError: The parameters are not on the CPU. There a stream waits, and the host cannot time it.
        """
        return hang_reports.delays(self.reducer.hang_reporter, self.device, self.process_group)

    def skipped_steps(self) -> SkippedSteps:
        """Returns how many steps `check_gradients="skip"` has dropped, and what was found in the last of them."""
        return SkippedSteps(*self.reducer.skipped_steps())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, as torch does.

        Raises:
            ValueError: `assign` is True, and the reducer would go on with the old parameters.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would put new parameters in place of those that DistributedDataParallel "
                "reduces: load without it, or assign before wrapping."
            )
        return super().load_state_dict(state_dict, strict)

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Builds the reducer and the logger, in place of torch's."""
        names_of = names_by_id(self.module)
        names = [names_of[id(param)] for param in parameters]
        if self.mixed_precision is not None:
            for index, param in enumerate(parameters):  # torch's hooks pass it to reducer._autograd_hook
                param._idx = index  # type: ignore[attr-defined]
        caps = bucket_caps(self)
        ignored, why_not = self.parameters_to_ignore, ""
        if sharding.keeps_rows(self):
            why_not = "with shard='gradients' buckets take turns in memory"
            # The buffer has room for two of the largest. On CUDA it may have more, as small calls of NCCL take long.
            if self.device.type == "cpu":
                why_not = "shard='gradients' keeps buckets small"
                caps = caps[:1] if self.bucket_bytes_cap_default else caps
        self._why_not_planned = why_not or obstacle_to_planning(self, parameters, expect_sparse_gradient)
        self.reducer = Reducer(
            self,
            parameters,
            names,
            expect_sparse_gradient,
            is_connected=self.__dict__.pop("_connects_now", False),
            bucket_caps=caps,
            find_unused_parameters=bool(self.find_unused_parameters),
            skip_unused_buckets=self.skip_all_reduce_unused_params,
            check_replicas_every=self.__dict__.get("_check_replicas_every", 0),
            frozen=[(n, p) for n, p in self.module.named_parameters() if not p.requires_grad and n not in ignored],
            gradients_stay_views=bool(self.gradient_as_bucket_view),
            plan_from_measurement=not self._why_not_planned,
        )
        set_gradient_check(self.reducer, self.__dict__.get("_check_gradients"), parameters[0].device)
        self.reducer.set_sync(self.require_backward_grad_sync)
        keeps_main_grads = not sharding.keeps_rows(self) and main_grads.keep_in_buffer(self.reducer, parameters)
        if keeps_main_grads and self.mixed_precision is not None:
            raise NotImplementedError(
                "main_grads() does not go together with mixed_precision: both say in which dtype gradients are kept. "
                "Leave one of the two out."
            )
        transports.warn_of_fallback(self.reducer.comm, self.process_group)
        self.logger = Logger(self, names, static_graph)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        """Does what torch's does, and marks the outputs by which the reducer recognizes this forward's backward."""
        output = super()._post_forward(output)
        if self._sharding is not None:
            self._sharding.gathers.wait()  # backward uses the transport
        if torch.is_grad_enabled() and self._has_reducer() and not self._use_python_reducer:
            announce(self.reducer, output)
        return output

    def wait_for_parameters(self) -> None:
        """Waits until this rank has all rows of all parameters, with `overlap_gather`. Other ranks need not call it.

        On CUDA the current stream waits, and the host does not. Order other streams behind it.

        Raises:
            RuntimeError: Another rank has ended, or did not step within the timeout.
        """
        if self._sharding is not None:
            self._sharding.gathers.end()

    def bucket_plan(self) -> BucketPlan:
        """Returns the buckets and, once the first steps have been timed, what the plan expected of them.

        Unless something prevents it (see `why_not` of the result), buckets are rebuilt twice. After the first
        synchronized step they take the order of its gradients. After three more they take the sizes that leave the
        least communication exposed, by the times of these steps and of a few all-reduces. Every rank makes the same
        plan. On CUDA this takes five more steps, as no step waits for the device's times, and no gradient moves.

        Two ranks sum to the same bits whatever the buckets are, and so do the ranks of a host through shared memory.
        Over a process group of more ranks the order of a sum may depend on a bucket's size. Two runs may then differ in
        their last bits, unless `bucket_cap_mb` fixes the sizes.

        Raises:
            RuntimeError: There is no reducer: the reductions of all parameters are delayed, or compiled into backward.
        """
        if not self._has_reducer() or self._use_python_reducer:
            raise RuntimeError("this DistributedDataParallel has no buckets: its gradients are reduced one by one.")
        return describe_plan(self.reducer, self._why_not_planned)

    # torch's own versions of the following pass the reducer to C++ code that expects torch's type.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers `hook(state, bucket)`, which reduces each full bucket in place of the transport, as in torch.

        Args:
            state: The hook's first argument.
            hook: Gets a `dist.GradBucket` that is not divided by the number of ranks. Returns a future of the tensor
                whose values the gradients take.

        Raises:
            TypeError: The hook is not callable, or returns something else.
            ValueError: Its annotations do not fit a communication hook.
            RuntimeError: A hook is registered already.
            NotImplementedError: The wrapper has a wire_dtype or shard="gradients".
        """
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._refuse_hook_on_wire(hook.__qualname__)
        self.reducer.set_python_hook(state, hook, first_caps_of_torch(self))
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        builtin = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        name = getattr(comm_hook_type, "name", None)
        if name not in builtin:
            raise ValueError(
                f"comm_hook_type is {comm_hook_type!r}, expected a dist.BuiltinCommHookType: {', '.join(builtin)}"
            )
        self._refuse_hook_on_wire(str(comm_hook_type))
        self.reducer.set_python_hook(self.process_group, builtin[name], first_caps_of_torch(self))
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _refuse_hook_on_wire(self, hook: str) -> None:
        sharding.refuse(self, f"communication hook {hook}")
        logical.refuse(self, f"communication hook {hook}")
        self.refuse_parts(f"communication hook {hook}")
        if (wire_dtype := self.__dict__.get("_wire_dtype")) is not None:
            raise NotImplementedError(
                f"communication hook {hook} does not go together with wire_dtype={wire_dtype}: a hook carries the "
                "gradients itself, in its own dtype, so wire_dtype would change nothing. Leave one out."
            )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Keeps times of the first ten steps and of every `sample_rate`-th after them, as torch does."""
        if sample_rate < 1:
            self._log_and_throw(  # type: ignore[no-untyped-call]
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}",
            )
        self.logger.sample_rate = sample_rate


_OUR_ARGUMENTS = dict(list(inspect.signature(DistributedDataParallel.__init__).parameters.items())[1:])
