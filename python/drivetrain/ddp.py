"""DistributedDataParallel: torch's class over drivetrain's own reducer and gradient arena."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.nn.parameter import is_lazy

from . import _C, main_grad, parameter_names, watch
from . import transport as transports
from .bucket_plan import BucketPlan, describe_plan
from .ddp_logger import Logger
from .reducer import Reducer

# Applied to arguments that the caller does not pass; install(**ddp_defaults) fills it.
defaults: dict[str, object] = {}

# A description of every wrapper made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []

_FIRST_BUCKET_BYTES = 1024 * 1024  # as torch: communication starts early in backward
# Arguments on which all ranks must agree.
_SAME_EVERYWHERE = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",
    "check_replicas_every",
)
_BUFFERS = "the broadcast of buffers"
_OURS_ALONE = ("transport", "check_replicas_every", "report_hang_after", "wire_dtype", "reuse_norm")
_TORCH_ARGUMENTS = inspect.signature(TorchDistributedDataParallel.__init__).parameters

P = ParamSpec("P")
R = TypeVar("R")


def _with_defaults(init: Callable[P, R]) -> Callable[P, R]:
    """Fills in `defaults` for arguments that were not passed."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if defaults:
            passed = signature.bind(*args, **kwargs).arguments
            kwargs.update({name: value for name, value in defaults.items() if name not in passed})
        return init(*args, **kwargs)

    return wrapper


class DistributedDataParallel(TorchDistributedDataParallel):
    """torch.nn.parallel.DistributedDataParallel with its constructor, over a reducer of our own.

    Gradients live in one persistent flat arena in bucket order: after a backward each `.grad` is a view of it, so that
    no second copy exists, whatever `gradient_as_bucket_view` says. Buckets are all-reduced while backward runs, from
    the first step on. `.grad` is the mean over ranks, as with torch. A tensor that a script keeps over a `.grad`
    (`p.grad.flatten()`) gets memory of its own before the next gradient is written, as long as
    `gradient_as_bucket_view` is False. An array that `.numpy()` made of it does not: copy that one.

    Every backward of this wrapper outside `no_sync()` ends with the mean over ranks in `.grad`, or raises: also a
    second one after the first, and one whose forward ran under `no_sync()`. These two are reduced when backward ends,
    and are known by the tensors in forward's output. Any other backward (through `.module`, of a penalty on parameters)
    stays this rank's own, as with torch. What would let replicas part in silence (a hook that steps on a gradient
    before it is reduced) raises and names the parameter.

    Args:
        ...: as torch's, by position and by keyword. An argument that the installed torch does not know may be given its
            default only. `batched_grad_copy` is accepted and changes nothing.
        transport: keyword only. What carries the gradients: "torch" (the process group), "shm" (shared memory between
            the CPU ranks of a host, the process group between hosts), "nccl" (for CUDA parameters on one device per
            process: an NCCL communicator of our own, with registered memory), or "auto", which takes the environment
            variable DRIVETRAIN_TRANSPORT if that is set, else "shm" for CPU parameters over gloo where ranks share a
            host, else "torch" ("nccl" has not been measured yet). Where memory cannot be shared, rank 0 warns and the
            process group is used. When a rank is lost, "nccl" raises in the call after the one under way, whose
            gradients are undefined.
        check_replicas_every: keyword only. Compare a checksum of all parameters over ranks in every so many
            synchronised backwards (0: never), and raise RuntimeError naming the first parameter that differs and where.
        report_hang_after: keyword only. Once this rank has waited so many seconds for others (0 or infinity: never),
            log a warning, to the logger "drivetrain", that names what waits, for which ranks, and where those were last
            seen: module, file and line. Again at growing intervals. None: what the environment variable
            DRIVETRAIN_REPORT_HANG_AFTER says, else 30. Waits of a GPU's stream are not reported. But where one over the
            process group lasts as long and the process of another rank on this host has ended, the group is aborted,
            and the thread that built the module gets a RuntimeError that names the rank.
        wire_dtype: keyword only. torch.bfloat16 (or its name): between hosts, and with transport="torch" between all
            ranks, float32 (and complex64) gradients travel as bfloat16, half the bytes, and are added up in float32:
            two roundings per element, of each rank's value and of the sum, however many ranks there are; every rank
            gets the same bits. Shared memory rounds nothing: among the ranks of one host it changes nothing. Other
            dtypes, sparse gradients, weights, counts and checksums go as they are. On the CPU over gloo only; not with
            communication hooks, which carry gradients themselves, and so not with what torch does by such hooks.
        reuse_norm: keyword only. Once a drivetrain optimizer with `max_grad_norm`, or `drivetrain.clip_grad_norm_`, has
            asked for the norm of just the gradients that this module's parameters have, the reduction adds up their
            squares while it has them in hand, and they are not read again for it. For shared memory within one host.
            The sum holds as long as the same tensors have seen no write since backward. Of writes through `.data` or a
            pointer (`.numpy()`) only those are seen that change one of 16 elements per gradient: so False by default,
            and True is for scripts that make none. Its order is that of the buckets, so that the norm's last bit of 53
            may differ from that of a read.

    Raises:
        ValueError: no process group is initialised, parameters are on devices of several types, or the module is on
            the CPU and has a SyncBatchNorm or `device_ids`; transport or wire_dtype is unknown, or check_replicas_every
            or report_hang_after negative.
        RuntimeError: nothing requires a gradient, the ranks' parameters differ (on every rank, naming the first), or
            transport is "nccl" and some rank has no CUDA parameters or no NCCL (on every rank, saying which and why).
        TypeError: an argument that the installed torch does not know.
        NotImplementedError: wire_dtype with parameters that are not on the CPU, a process group that is not gloo there,
            or reductions that pass by the reducer.
    """

    reducer: Reducer  # type: ignore[assignment]  # torch's wrapper wants its methods, not its type
    logger: Logger

    @_with_defaults
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
        reuse_norm: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OUR_ARGUMENTS}
        changed = {name: value for name, value in given.items() if value is not _OUR_ARGUMENTS[name].default}
        _refuse_unknown(changed)
        if check_replicas_every < 0:
            raise ValueError(f"check_replicas_every is {check_replicas_every}, expected a number of steps, or 0: never")
        self._transport = transports.requested(transport)
        self._wire_dtype = transports.requested_wire_dtype(wire_dtype)
        if self._wire_dtype is not None and delay_all_reduce_named_params is not None:
            raise NotImplementedError(
                "wire_dtype does not go together with delay_all_reduce_named_params: torch reduces those parameters "
                "past the reducer, as they are. Leave one of the two out."
            )
        self._hooks_a_delayed_parameter = any(
            param is param_to_hook_all_reduce for _, param in delay_all_reduce_named_params or ()
        )
        self._report_hang_after = watch.limit_from(report_hang_after)
        _check_devices(_trained_parameters(module))
        if process_group is None and device_mesh is None and not dist.is_initialized():
            raise ValueError(
                "DistributedDataParallel needs a process group and none is initialised: start the script with "
                "torchrun and call torch.distributed.init_process_group() first, or pass process_group."
            )
        if init_sync and not any(is_lazy(param) for param in module.parameters()):  # torch has a word for lazy ones
            arguments = {name: given[name] for name in _SAME_EVERYWHERE}
            arguments |= {
                "transport": self._transport,
                "report_hang_after": self._report_hang_after,
                "wire_dtype": self._wire_dtype,
            }
            group = process_group
            if device_mesh is not None and device_mesh.ndim == 1:
                group = device_mesh.get_group()
            _check_same_on_all_ranks(module, _trained_parameters(module), arguments, group)
        self._check_replicas_every = check_replicas_every
        self._reuse_norm = reuse_norm
        super().__init__(**{name: value for name, value in changed.items() if name in _TORCH_ARGUMENTS})
        if self._use_python_reducer:  # then torch's own Python hooks reduce, compiled into backward
            if self._wire_dtype is not None:
                raise NotImplementedError(
                    "wire_dtype does not go together with torch._dynamo.config.optimize_ddp = 'python_reducer': torch "
                    "reduces then, past the reducer. Leave one of the two out."
                )
            self.reducer._remove_autograd_hooks()
        if not self._has_reducer():  # every all-reduce is delayed: torch returned before it did these two
            self._lazy_init_ran = True
            if init_sync:
                _sync_module_states(self.module, self.process_group, self.broadcast_bucket_size, 0, set())
        parameter_names.remember(module)
        size = sum(param.numel() for _, param in _trained_parameters(module)) / 1e6
        count = len(self.reducer.buckets()) if self._has_reducer() else 0  # none where every all-reduce is delayed
        name = type(module).__name__
        constructed.append(f"{name} ({size:.1f} M parameters, {count} {'bucket' if count == 1 else 'buckets'})")

    def _has_reducer(self) -> bool:
        return "reducer" in self.__dict__

    # Torch reads this flag at forward only. The reducer must know it at backward too: a backward through this wrapper's
    # outputs that begins while it is set is reduced, whatever it was at forward.
    @property
    def require_backward_grad_sync(self) -> bool:
        return bool(self.__dict__.get("_require_backward_grad_sync", True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.__dict__["_require_backward_grad_sync"] = sync
        if self._has_reducer():
            self.reducer.set_sync(sync)

    # Torch sets it when the first backward, synchronised or not, enqueues what counts a static graph's gradients. We
    # want that until they are counted.
    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        return self.reducer.is_graph_known()

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, enqueued: bool) -> None:
        pass

    # Torch sets it in the forward that rebuilds. Ours are rebuilt when a backward begins, and torch's hooks that step
    # a ZeroRedundancyOptimizer want to know from that backward on.
    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._has_reducer() and self.reducer.has_rebuilt_buckets()

    @_has_rebuilt_buckets.setter
    def _has_rebuilt_buckets(self, rebuilt: bool) -> None:
        pass

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """Called once the gradient of `param_to_hook_all_reduce` is there; reduces `delay_all_reduce_named_params`.

        As torch's, which besides reduces under no_sync(), too, does not wait for the result before backward ends, and
        leaves out that gradient itself where it is one of the delayed ones.
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
        """`loss.backward()`, weighted: the gradients become the mean over everything that the weights count.

        With a mean loss over a micro-batch and the number of tokens (samples, ...) in it as weight, `.grad` after the
        synchronised backward is the mean over all tokens of all ranks, and of all micro-batches since the last
        synchronised backward (under `no_sync()`), each given with its weight here. Without weights, torch's mean of
        means gives tokens on short batches more to say.

        Every rank must give a weight in the same backwards. The loss is multiplied with it before backward: in float16
        large weights overflow (give them as shares of a usual batch). With weight 0 no backward runs and the loss,
        which may be nan as the mean of nothing, is not looked at; this rank takes part in the reduction all the same.

        Args:
            loss: as for `torch.Tensor.backward`.
            weight: of this rank's micro-batch, finite and >= 0. None: plain `loss.backward()`.
            **kwargs: for `torch.Tensor.backward`.

        Raises:
            ValueError: the weight is negative or not finite, all ranks' weights sum to 0 (on every rank), `.grad` holds
                gradients that no weight counts, or the ranks are in `join()`.
            NotImplementedError: with optimizers that run inside backward, or with `mixed_precision`.
        """
        if weight is None:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        weight = checked_weight(weight)
        if self._join_config.enable:
            raise ValueError("weight does not go together with join(): ranks without inputs take no part in it")
        self.reducer.begin_weighted(weight)
        failed = True
        try:
            if weight > 0:
                (loss * weight).backward(**kwargs)  # type: ignore[no-untyped-call]
            elif self.require_backward_grad_sync:
                self.reducer.reduce_collected()
            failed = False
        finally:
            self.reducer.end_weighted(failed)

    def lateness(self) -> list[float]:
        """How long each rank keeps the others waiting in a step, to find the one that is slow.

        The rank that comes last waits least. A rank's lateness is the longest wait over ranks minus its own, where its
        wait is the time per step that it spends waiting for gradients and buffers: the median over the last 32
        synchronised steps. Waits in other collectives (SyncBatchNorm's, the script's own) do not count. No clock is
        compared between hosts, and no other rank need call this; what others say of themselves is up to a quarter of
        `report_hang_after` old.

        Returns:
            Seconds, for every rank of the process group; nan for those that have told nothing.

        Raises:
            RuntimeError: `report_hang_after` is 0, so that ranks tell each other nothing.
            NotImplementedError: the parameters are not on the CPU: a stream waits there, and no clock of the host's
                tells for how long.
        """
        if self.device.type != "cpu":
            raise NotImplementedError(
                f"lateness() is for parameters on the CPU, and these are on {self.device}: there a stream waits, not "
                "the host."
            )
        if self.reducer.watched is None:
            if dist.get_world_size(self.process_group) == 1:
                return [0.0]
            raise RuntimeError(
                "lateness() needs what the ranks tell each other for hang reports, and report_hang_after is 0: pass "
                "seconds > 0."
            )
        return self.reducer.watched.lateness()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's.

        Raises:
            ValueError: `assign=True`: the reducer would go on with the old parameters.
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
        """The one place where torch builds its reducer and logger; builds ours instead."""
        names_of = {id(param): name for name, param in self.module.named_parameters()}
        names = [names_of[id(param)] for param in parameters]
        if self.mixed_precision is not None:
            for index, param in enumerate(parameters):  # torch's hooks pass it to reducer._autograd_hook
                param._idx = index  # type: ignore[attr-defined]
        caps = list(self.bucket_bytes_cap_list) or [self.bucket_bytes_cap]
        if self.bucket_bytes_cap_default:
            caps.insert(0, _FIRST_BUCKET_BYTES)
        ignored = self.parameters_to_ignore
        self._why_not_planned = self._obstacle_to_planning(parameters, expect_sparse_gradient)
        wire_dtype = self.__dict__.get("_wire_dtype")
        comm = transports.make_comm(self._transport, self.process_group, parameters[0].device, wire_dtype)
        self.reducer = Reducer(
            params=parameters,
            names=names,
            process_group=self.process_group,
            comm=comm,
            transport=self._transport,
            wire_dtype=wire_dtype,
            bucket_caps=caps,
            sparse=expect_sparse_gradient,
            find_unused_parameters=self.find_unused_parameters,
            skip_unused_buckets=self.skip_all_reduce_unused_params,
            check_replicas_every=self.__dict__.get("_check_replicas_every", 0),
            frozen=[(n, p) for n, p in self.module.named_parameters() if not p.requires_grad and n not in ignored],
            modules=list(self.module.named_modules()),
            report_hang_after=self.__dict__.get("_report_hang_after", watch.DEFAULT_LIMIT_S),
            shares_norm=self.__dict__.get("_reuse_norm", False),
            gradients_stay_views=self.gradient_as_bucket_view,
            plan_from_measurement=not self._why_not_planned,
        )
        self.reducer.set_sync(self.require_backward_grad_sync)
        if main_grad.keep_in_arena(self.reducer, parameters) and self.mixed_precision is not None:
            raise NotImplementedError(
                "main_grads() does not go together with mixed_precision: both say in which dtype gradients are kept. "
                "Leave one of the two out."
            )
        transports.warn_of_fallback(comm, self.process_group)
        self.logger = Logger(self, names, comm.name, static_graph)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        """As torch's; and tells the reducer by which tensors it will know this forward's backward."""
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self._has_reducer() and not self._use_python_reducer:
            _announce(self.reducer, output)
        return output

    def _sync_buffers(self) -> None:
        """As torch's: all ranks take rank 0's buffers."""
        with watch.waiting(self.reducer.progress(), _BUFFERS):
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def _obstacle_to_planning(self, parameters: list[nn.Parameter], sparse: list[bool]) -> str:
        """Why buckets are not planned from measurement, "" if they are; the same on every rank."""
        obstacles = {
            "there is one rank only": dist.get_world_size(self.process_group) == 1,
            "bucket sizes were given": not self.bucket_bytes_cap_default,
            "find_unused_parameters=True: which gradients come differs from step to step": self.find_unused_parameters,
            "with mixed_precision the buckets stay as they are": self.mixed_precision is not None,
            "some gradients are sparse": any(sparse),
            "only on the CPU do the host's clocks tell when a gradient is there": parameters[0].device.type != "cpu",
        }
        return next((obstacle for obstacle, stands in obstacles.items() if stands), "")

    def bucket_plan(self) -> BucketPlan:
        """The buckets as they are, and, once the first steps have been timed, what the plan expected of them.

        Where nothing stands against it (`why_not` of the result says what does), buckets are rebuilt twice: after the
        first synchronised step in the order of its gradients, and after three more in the sizes that leave the least
        communication exposed, by these steps' times and those of a few all-reduces. Every rank makes the same plan. Two
        ranks sum to the same bits whatever the buckets are, and so do those of a host through shared memory; over a
        process group of more ranks the order of a sum may depend on a bucket's size, so that two runs may differ in
        last bits: `bucket_cap_mb` gives the sizes of every run.

        Raises:
            RuntimeError: no reducer exists: all parameters' reductions are delayed, or hooks compiled into backward
                reduce.
        """
        if not self._has_reducer() or self._use_python_reducer:
            raise RuntimeError("this DistributedDataParallel has no buckets: its gradients are reduced one by one.")
        return describe_plan(self.reducer, self._why_not_planned)

    # Torch's own versions hand the reducer to C++ that is typed for torch's.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: `hook(state, bucket)` gets each full bucket, a `dist.GradBucket` not divided by the number of
        ranks, and returns a future of the tensor whose values the gradients shall have.

        Raises:
            TypeError: the hook is not callable, or returns something else.
            ValueError: its annotations are not those of a communication hook.
            RuntimeError: a hook is registered already.
            NotImplementedError: the wrapper has a wire_dtype.
        """
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._refuse_hook_on_wire(hook.__qualname__)
        self.reducer.set_python_hook(state, hook)
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
        self.reducer.set_python_hook(self.process_group, builtin[name])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _refuse_hook_on_wire(self, hook: str) -> None:
        if (wire_dtype := self.__dict__.get("_wire_dtype")) is not None:
            raise NotImplementedError(
                f"communication hook {hook} does not go together with wire_dtype={wire_dtype}: a hook carries the "
                "gradients itself, in the dtype it likes, so that wire_dtype would change nothing. Leave one out."
            )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """As torch's: times are kept of the first ten steps and of every `sample_rate`-th after them."""
        if sample_rate < 1:
            self._log_and_throw(  # type: ignore[no-untyped-call]
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}",
            )
        self.logger.set_sample_rate(sample_rate)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """What a rank that has run out of inputs does in the others' backward; its own `.grad` become their mean."""
        self.reducer.shadow_planning()
        as_sum = not self._divide_by_initial_world_size
        reduces = [self.reducer._run_comm_hook(i, as_sum) for i in self.reducer._get_zeros_like_grad_buckets()]
        for i, reduce in enumerate(reduces):
            self.reducer.wait_for_zeros(i, reduce)
        self.reducer.shadow_used_map()

    # The other waits of join(), so that a report can say what is awaited.

    def _check_and_sync_module_buffers(self) -> None:
        with watch.waiting(self.reducer.progress(), _BUFFERS):
            super()._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        with watch.waiting(self.reducer.progress(), "the agreement on whether to synchronise"):
            found: bool | None = super()._check_global_requires_backward_grad_sync(  # type: ignore[no-untyped-call]
                is_joined_rank
            )
        return found

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        with watch.waiting(self.reducer.progress(), "the last broadcast of parameters, in join(),"):
            super()._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """As torch's.

        Raises:
            NotImplementedError: an optimizer steps in backward: a rank that has run out of inputs has none.
        """
        if self._has_reducer() and self.reducer.steps_in_backward:
            raise NotImplementedError(
                "join() does not go together with optimizer.step_in_backward(): a rank that has run out of inputs has "
                "no backward to step in. Give every rank as many inputs, or step after backward."
            )
        return _WatchedJoinHook(super().join_hook(**kwargs), self.reducer.progress())  # type: ignore[no-untyped-call]

    def _match_unused_params_allreduce(self) -> None:
        """Nothing: torch's wrapper calls it by another rule than the one by which our reducer shares that map."""


@_disable_dynamo
def _announce(reducer: Reducer, output: Any) -> None:
    reducer.announce(list(_find_tensors(output)))  # type: ignore[no-untyped-call]


class _WatchedJoinHook(JoinHook):
    """Torch's hook of a rank that has run out of inputs, which waits for the others' next step between its calls."""

    def __init__(self, hook: JoinHook, progress: _C.Progress) -> None:
        self._hook = hook
        self._progress = progress
        self._is_waiting = False

    def main_hook(self) -> None:
        self._end_wait()
        self._hook.main_hook()
        self._progress.begin_wait("the beginning, on ranks that still have inputs,")
        self._is_waiting = True

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end_wait()
        self._hook.post_hook(is_last_joiner)

    def _end_wait(self) -> None:
        if self._is_waiting:
            self._progress.end_wait()
        self._is_waiting = False


_OUR_ARGUMENTS = dict(list(inspect.signature(DistributedDataParallel.__init__).parameters.items())[1:])


def wrapper_in(model: nn.Module, caller: str) -> DistributedDataParallel | None:
    """The DistributedDataParallel that the model is or has inside, if it has one.

    Raises:
        NotImplementedError: it has torch's, several, one without a reducer, or is sharded.
    """
    wrappers = [module for module in model.modules() if isinstance(module, TorchDistributedDataParallel)]
    for module in model.modules():
        if "FSDP" in type(module).__name__ or type(module).__name__ == "FullyShardedDataParallel":
            raise NotImplementedError(
                f"{caller} does not support sharded models (FSDP), where torch's own means remain: no_sync(), "
                "set_requires_gradient_sync()."
            )
    if not wrappers:
        return None
    wrapper = wrappers[0]
    if len(wrappers) > 1 or not isinstance(wrapper, DistributedDataParallel):
        what = f"{len(wrappers)} DistributedDataParallel wrappers" if len(wrappers) > 1 else "torch's own class"
        raise NotImplementedError(
            f"{caller} needs a model in one drivetrain.DistributedDataParallel, or in none; this one has {what}: swap "
            "it (drivetrain.install() does it for a script that builds torch's)."
        )
    if not wrapper._has_reducer() or wrapper._use_python_reducer:
        raise NotImplementedError(
            f"{caller} needs the reducer, and this DistributedDataParallel has none: all its parameters' reductions "
            "are delayed, or compiled into backward."
        )
    return wrapper


def checked_weight(weight: float) -> float:
    """The weight; raises ValueError for what can be none."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight is {weight}, expected a finite number >= 0: how many tokens the loss is a mean of")
    return float(weight)


def _refuse_unknown(changed: dict[str, object]) -> None:
    """Raises for arguments, given as something else than their default, that the installed torch does not have."""
    for name in changed:
        if name not in _TORCH_ARGUMENTS and name not in _OURS_ALONE and name != "batched_grad_copy":
            raise TypeError(
                f"torch {torch.__version__} does not know DistributedDataParallel's argument {name!r} (given "
                f"{changed[name]!r}): leave it out, or upgrade torch."
            )


def _trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that will be reduced, with their names."""
    ignored: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored]


def _check_devices(named_params: list[tuple[str, nn.Parameter]]) -> None:
    first_on: dict[torch.device, str] = {}
    for name, param in named_params:
        first_on.setdefault(param.device, name)
    where = ", ".join(f"{name!r} on {device}" for device, name in first_on.items())
    if len({device.type for device in first_on}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters are "
            f"spread: {where}. Move the module to one device with module.to(device)."
        )


def _check_same_on_all_ranks(
    module: nn.Module,
    named_params: list[tuple[str, nn.Parameter]],
    arguments: dict[str, object],
    group: dist.ProcessGroup | None,
) -> None:
    """Raises RuntimeError on every rank if any two disagree about what is reduced, naming the first difference."""
    mine = {f"argument {name!r}": repr(value) for name, value in arguments.items()}
    for name, param in named_params:
        mine[f"parameter {name!r}"] = f"{tuple(param.shape)} {param.dtype}, strides {param.stride()}"
        if param.grad_dtype not in (param.dtype, None):
            mine[f"the gradient of parameter {name!r}"] = str(param.grad_dtype)
    digest = hashlib.sha256(repr(list(mine.items())).encode()).digest()
    device = next((param.device for _, param in named_params), torch.device("cpu"))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if len(set(_gather(digest, group))) == 1:
            return
        by_rank = _gather(mine, group)
    for what in dict.fromkeys(what for facts in by_rank for what in facts):
        found = [facts.get(what, "not there") for facts in by_rank]
        if len(set(found)) > 1:
            ranks = "; ".join(f"rank {rank}: {fact}" for rank, fact in enumerate(found))
            raise RuntimeError(
                "DistributedDataParallel needs the same model and arguments on every rank, but "
                f"{what} differs: {ranks}."
            )
    raise RuntimeError(
        "DistributedDataParallel needs the same model on every rank, but the ranks registered the same parameters in "
        "different orders: build the model in the same order everywhere."
    )


def _gather(item: R, group: dist.ProcessGroup | None) -> list[R]:
    """Every rank's item, on every rank."""
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
