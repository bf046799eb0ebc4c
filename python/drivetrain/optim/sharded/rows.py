"""Rows: the DTensors of gradients and states that take the place of plain tensors in scripts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication

_DTensor: Any = DTensor  # torch does not type its constructor
_NOT_SAVED = (
    "pickle found a tensor of DistributedDataParallel(shard=...), of which this rank has a part only{why}. Call "
    "drivetrain.optim.full_state_dict(optimizer) on every rank, and save its result on one. "
    "torch.distributed.checkpoint and drivetrain's Checkpointer save parts from every rank."
)


class Rows(DTensor):
    """A DTensor that scripts use as a plain tensor.

    Operations on it return plain DTensors. Whole tensors in them count as equal on all ranks.

    Attributes:
        whole: Returns all ranks' rows as a plain tensor, for a file that this rank writes. None: they cannot be had.
    """

    whole: Callable[[], Tensor] | None = None

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(
                f"a tensor of {list(value.shape)}, {value.dtype} is assigned to the `.data` of rows that "
                f"DistributedDataParallel(shard=...) keeps of {list(self.shape)}, {self.dtype}: expected the same "
                "shape and dtype."
            )
        mesh, placements = self.device_mesh, self.placements
        values = value.detach()
        if not isinstance(values, DTensor):
            values = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        self._local_tensor = values.redistribute(placements=placements)._local_tensor
        torch.autograd.graph.increment_version(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with implicit_replication():
            return _DTensor.__torch_dispatch__(func, types, args, kwargs or {})

    def redistribute(self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> DTensor:
        """Returns a DTensor with other placements. 16-bit integers, which gloo and NCCL lack, travel as 32 bits."""
        if self.dtype != torch.int16:
            return super().redistribute(device_mesh, placements, **options)
        wide: Any = self.int()
        moved: DTensor = wide.redistribute(device_mesh, placements, **options).short()
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = self.clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.whole is None:
            return _DTensor(self._local_tensor, self._spec, requires_grad=False).__reduce_ex__(protocol)
        try:
            whole = self.whole()
        except RuntimeError as error:
            raise TypeError(_NOT_SAVED.format(why=f", and {error}")) from error
        return whole.__reduce_ex__(protocol)


def refuse_files(mesh: DeviceMesh) -> None:
    """Makes DTensors on this mesh raise where something pickles them, since a file would hold one rank's part."""

    def refuse(protocol: Any) -> Any:
        raise TypeError(_NOT_SAVED.format(why=""))

    instance: Any = mesh
    instance.__reduce_ex__ = refuse
    instance.__deepcopy__ = lambda memo: mesh
