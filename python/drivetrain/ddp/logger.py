"""Provides the logger that torch's DistributedDataParallel expects, behind `_get_ddp_logging_data()`."""

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .gather import is_foreign

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel

_FIRST_STEPS = 10  # samples all of these, as torch does, and later every `sample_rate`-th
_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_BACKEND_ENVIRONMENT = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}


class Logger:
    """Keeps the wrapper's properties, under torch's keys, and the times of sampled steps.

    Times are nanoseconds of the host's monotonic clock, and durations nanoseconds. Forward lasts from its beginning to
    the first gradient, and backward from there to the last gradient. Communication lasts from the first bucket's start
    to the last one's end.
    """

    def __init__(self, ddp: "DistributedDataParallel", names: list[str], static_graph: bool) -> None:
        self._reducer = ddp.reducer
        self._steps = 0
        self._samples = 0
        self.sample_rate = 100  # steps between two samples after the first ten
        self._names = {name: index for index, name in enumerate(names)}
        buckets = ddp.reducer.buckets()
        trained = [p for p in ddp.module.parameters() if p.requires_grad]
        group = ddp.process_group
        backend = group.name() if is_foreign(group) else dist.get_backend(group)
        self._ints: dict[str, int] = {
            "world_size": group.size(),
            "rank": group.rank(),
            "num_parameter_tensors": sum(len(bucket.names) for bucket in buckets),
            "total_parameter_size_bytes": sum(p.nbytes for p in trained),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(bool(ddp.find_unused_parameters)),
            "gradient_as_bucket_view": int(bool(ddp.gradient_as_bucket_view)),
            "broadcast_buffers": int(bool(ddp.broadcast_buffers)),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "iteration": 0,
        }
        self._strs: dict[str, str] = {
            "module_name": type(ddp.module).__name__,
            "backend_name": backend,
            "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in trained})),
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "bucket_sizes": ", ".join(str(bucket.bytes) for bucket in buckets),
        }
        for key, variable in (_ENVIRONMENT | _BACKEND_ENVIRONMENT.get(backend, {})).items():
            self._strs[key] = os.environ.get(variable, "N/A")
        if backend == "gloo":
            self._ints["gloo_num_threads"] = 2  # as many as torch starts
        if static_graph:
            self._ints["static_graph"] = 1

    def set_runtime_stats_and_log(self) -> None:
        """Samples the last step. torch calls it before every synchronized forward."""
        steps, self._steps = self._steps, self._steps + 1
        if steps == 0 or not (steps <= _FIRST_STEPS or steps % self.sample_rate == 0):
            return
        times = self._reducer.times()
        if times.comm_end == 0:
            return
        self._samples += 1
        overlap_end = max(times.comm_start, times.backward_end)
        durations = {
            "forward_compute_time": times.backward_start - times.forward_start,
            "backward_compute_time": times.backward_end - times.backward_start,
            "backward_comm_time": times.comm_end - times.comm_start,
            "backward_compute_comm_overlap_time": min(overlap_end, times.comm_end) - times.comm_start,
        }
        for key, duration in durations.items():
            mean = self._ints.get(f"avg_{key}", 0)
            self._ints[key] = duration
            self._ints[f"avg_{key}"] = mean + (duration - mean) // self._samples
        self._ints |= {
            "iteration": steps,
            "forward_compute_time_start": times.forward_start,
            "backward_compute_time_start": times.backward_start,
            "backward_compute_time_end": times.backward_end,
            "backward_comm_time_start": times.comm_start,
            "backward_comm_time_end": times.comm_end,
            "num_buckets_reduced": times.buckets_reduced,
        }

    def set_error_and_log(self, message: str) -> None:
        """Notes the message of an error that the wrapper raises."""
        self._strs["error"] = message
        self._ints["has_error"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._strs["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._ints["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._ints["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> Any:
        strs, ints = self._strs | {"transport": self._reducer.comm.name}, dict(self._ints)
        if error := self._reducer.last_error():
            strs["error"] = error
            ints["has_error"] = 1
        ints["can_set_static_graph"] = int(self._reducer._ddp_graph_static())
        if self._reducer.has_rebuilt_buckets():
            buckets = self._reducer.buckets()
            indices = [[self._names[name] for name in bucket.names] for bucket in buckets]
            ints["has_rebuilt_buckets"] = 1
            strs["rebuilt_bucket_sizes"] = ", ".join(str(bucket.bytes) for bucket in buckets)
            strs["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, bucket)) for bucket in indices)
            strs["prev_iteration_grad_ready_order_indices"] = ", ".join(str(i) for bucket in indices for i in bucket)
        return SimpleNamespace(strs_map=strs, ints_map=ints)
