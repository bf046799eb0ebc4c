"""DistributedDataParallel: torch's class over drivetrain's own reducer and gradient arena."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from . import _C
from . import transport as transports

# Applied to arguments that the caller does not pass; install(**ddp_defaults) fills it.
defaults: dict[str, object] = {}

# A description of every wrapper made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []

_FIRST_BUCKET_BYTES = 1024 * 1024  # as torch: communication starts early in backward
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
    the first step on. `.grad` is the mean over ranks, as with torch. The arena is reused: a reference kept to a `.grad`
    shows the next backward's values, so clone what you want to keep.

    Args: as torch's. Not supported yet (NotImplementedError when set): `static_graph`, `delay_all_reduce_named_params`,
        `param_to_hook_all_reduce`, `mixed_precision`, `device_mesh`, `skip_all_reduce_unused_params`; likewise
        communication hooks, `join`, sparse gradients and backward with `create_graph=True`. An argument that the
        installed torch does not know may be given its default only.
        `gradient_as_bucket_view` and `batched_grad_copy` are accepted and change nothing.
        transport: what carries the gradients: "torch" (the process group), "shm" (shared memory between the CPU ranks
            of a host, the process group between hosts), or "auto", which takes the environment variable
            DRIVETRAIN_TRANSPORT if that is set, else "shm" for CPU parameters over gloo where ranks share a host, else
            "torch". Where memory cannot be shared, rank 0 warns and the process group is used.

    Raises:
        ValueError: `transport` is unknown, no process group is initialised, parameters are on devices of several types,
            or the module is on the CPU and has a SyncBatchNorm or `device_ids`.
        RuntimeError: nothing requires a gradient, or the ranks' parameters differ (on every rank, naming the first).
        NotImplementedError: see above.
        TypeError: an argument that the installed torch does not know.
    """

    reducer: _C.Reducer  # type: ignore[assignment]  # torch's wrapper wants its methods, not its type
    logger: "_Logger"

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
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OUR_ARGUMENTS}
        changed = {name: value for name, value in given.items() if value is not _OUR_ARGUMENTS[name].default}
        _refuse_unsupported(changed)
        self._transport = transports.requested(transport)
        named_params = _trained_parameters(module)
        _check_devices(named_params)
        if process_group is None and not dist.is_initialized():
            raise ValueError(
                "DistributedDataParallel needs a process group and none is initialised: start the script with "
                "torchrun and call torch.distributed.init_process_group() first, or pass process_group."
            )
        if init_sync and not any(is_lazy(param) for param in module.parameters()):  # torch has a word for lazy ones
            arguments = {
                name: given[name] for name in ("bucket_cap_mb", "bucket_cap_mb_list", "find_unused_parameters")
            }
            arguments["transport"] = self._transport
            _check_same_on_all_ranks(module, named_params, arguments, process_group)
        super().__init__(**{name: value for name, value in changed.items() if name in _TORCH_ARGUMENTS})
        size = sum(param.numel() for _, param in named_params) / 1e6
        count = len(self.reducer.buckets())
        name = type(module).__name__
        constructed.append(f"{name} ({size:.1f} M parameters, {count} {'bucket' if count == 1 else 'buckets'})")

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
        sparse = [name for name, is_sparse in zip(names, expect_sparse_gradient, strict=True) if is_sparse]
        if sparse:
            raise _unsupported(f"sparse gradients (an Embedding with sparse=True holds {sparse[0]!r})")
        caps = list(self.bucket_bytes_cap_list) or [self.bucket_bytes_cap]
        if self.bucket_bytes_cap_default:
            caps.insert(0, _FIRST_BUCKET_BYTES)
        comm = transports.make_comm(self._transport, self.process_group, parameters[0].device)
        self.reducer = _C.Reducer(
            params=parameters,
            names=names,
            comm=comm,
            bucket_caps=caps,
            find_unused_parameters=self.find_unused_parameters,
        )
        transports.warn_of_fallback(comm, self.process_group)
        self.logger = _Logger(self, comm.name)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    # What torch's class offers and this one does not yet: an error each, never a silent gap.

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported yet."""
        raise _unsupported("join() (uneven inputs)")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Not supported yet."""
        raise _unsupported("join_hook() (uneven inputs)")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Not supported yet; this includes optimizers that run inside backward."""
        raise _unsupported("communication hooks (register_comm_hook, optimizers in backward)")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        raise _unsupported("communication hooks (_register_builtin_comm_hook)")

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unsupported("buffer communication hooks")

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unsupported("optimizers fused into backward (_register_fused_optim)")

    def _set_static_graph(self) -> NoReturn:
        raise _unsupported("static_graph=True")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> NoReturn:
        raise _unsupported("sparse gradients")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        raise _unsupported("changing the process group of a wrapped module")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted as torch does; this reducer keeps no sampled runtime statistics."""
        if sample_rate < 1:
            raise ValueError(f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}")

    def _lazy_init(self) -> None:
        if self._use_python_reducer:
            raise _unsupported('torch._dynamo.config.optimize_ddp="python_reducer"')
        super()._lazy_init()  # type: ignore[no-untyped-call]


_OUR_ARGUMENTS = dict(list(inspect.signature(DistributedDataParallel.__init__).parameters.items())[1:])


class _Logger:
    """What torch's wrapper expects of its logger: facts for _get_ddp_logging_data(), and nothing else to do."""

    def __init__(self, ddp: DistributedDataParallel, transport: str) -> None:
        buckets = ddp.reducer.buckets()
        self._ints = {
            "world_size": dist.get_world_size(ddp.process_group),
            "rank": dist.get_rank(ddp.process_group),
            "num_parameter_tensors": sum(len(bucket.names) for bucket in buckets),
            "total_parameter_size_bytes": sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": 1,
            "static_graph": 0,
            "can_set_static_graph": 0,
        }
        self._strs = {
            "module_name": type(ddp.module).__name__,
            "backend_name": dist.get_backend(ddp.process_group),
            "bucket_sizes": ", ".join(str(bucket.bytes) for bucket in buckets),
            "comm_hook": "",
            "transport": transport,
        }

    def set_runtime_stats_and_log(self) -> None:
        """Called at every synchronised forward; timings come with the monitor."""

    def set_error_and_log(self, message: str) -> None:
        """Called right before the wrapper raises; keeps the text for _get_ddp_logging_data()."""
        self._strs["error"] = message

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map=dict(self._strs), ints_map=dict(self._ints))


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"drivetrain's DistributedDataParallel does not support {what} yet: use "
        "torch.nn.parallel.DistributedDataParallel for this model."
    )


def _refuse_unsupported(changed: dict[str, object]) -> None:
    """Raises for arguments, given as something else than their default, that would otherwise be ignored."""
    for name in (
        "static_graph",
        "delay_all_reduce_named_params",
        "param_to_hook_all_reduce",
        "mixed_precision",
        "device_mesh",
        "skip_all_reduce_unused_params",
    ):
        if name in changed:
            raise _unsupported(name)
    for name in changed:
        if name not in _TORCH_ARGUMENTS and name not in ("batched_grad_copy", "transport"):
            raise TypeError(
                f"torch {torch.__version__} does not know DistributedDataParallel's argument {name!r} (given "
                f"{changed[name]!r}): leave it out, or upgrade torch."
            )


def _trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that will be reduced, with their names."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
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
    if len(first_on) > 1:
        raise _unsupported(f"modules spread over several devices ({where})")


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
    digest = hashlib.sha256(repr(list(mine.items())).encode()).digest()
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
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
