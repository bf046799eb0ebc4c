"""Maps NUMA nodes, network cards, GPUs and their links for `drivetrain doctor`, from sysfs and torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain.cli.finding import Finding, passed, warn

_SYS = Path("/sys")
_VIRTUAL = "devices/virtual"  # where sysfs keeps interfaces without a card


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        node: Its NUMA node; None: not known.
        peers: The GPUs whose memory it reaches directly.
        num_nvlinks: Its active links; 0: none, or not known.
    """

    node: int | None
    peers: frozenset[int] = field(default_factory=frozenset)
    num_nvlinks: int = 0


def check_topology(sys: Path = _SYS, gpus: Sequence[Gpu] | None = None) -> Finding:
    """Shows which cores, network cards and GPUs are near each other.

    Args:
        sys: The root of sysfs.
        gpus: The GPUs; None finds this host's.
    """
    found = _gpus(sys) if gpus is None else list(gpus)
    nodes = _nodes(sys)
    cards = _network_cards(sys)
    parts = [f"NUMA node {node}: cores {cores}" for node, cores in nodes.items()] or ["NUMA nodes are not known"]
    parts += [f"{name}: {_near(node)}" for name, node in cards.items()]
    parts += [_described(index, gpu) for index, gpu in enumerate(found)]
    text = "; ".join(parts)
    for index, gpu in enumerate(found):
        missing = [other for other in range(len(found)) if other != index and other not in gpu.peers]
        if missing:
            return warn(
                "topology",
                f"GPU {index} does not reach GPU {missing[0]} directly (P2P): copies go through the host; {text}",
                "turn ACS and IOMMU off in the firmware or the kernel's command line, or see `nvidia-smi topo -p2p r`",
            )
    near = {node for node in cards.values() if node is not None}
    far = [index for index, gpu in enumerate(found) if gpu.node is not None and near and gpu.node not in near]
    if far and len(nodes) > 1:
        text = f"GPU {far[0]} is on NUMA node {found[far[0]].node}, which has no network card; {text}"
        return warn("topology", text, "name the nearest card of each GPU in NCCL_IB_HCA or NCCL_SOCKET_IFNAME")
    return passed("topology", text)


def _near(node: int | None) -> str:
    return "near no NUMA node" if node is None else f"near node {node}"


def _described(index: int, gpu: Gpu) -> str:
    links = f", {gpu.num_nvlinks} NVLinks" if gpu.num_nvlinks else ""
    peers = f", P2P with {', '.join(map(str, sorted(gpu.peers)))}" if gpu.peers else ""
    return f"GPU {index}: {_near(gpu.node)}{links}{peers}"


def _nodes(sys: Path) -> dict[int, str]:
    folders = sorted((sys / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = {}
    for folder in folders:
        with suppress(OSError):  # some containers hide it
            nodes[int(folder.name[4:])] = (folder / "cpulist").read_text().strip() or "none"
    return nodes


def _network_cards(sys: Path) -> dict[str, int | None]:
    """Returns the NUMA node of each interface with a card that is not down, and of each InfiniBand card."""
    cards: dict[str, int | None] = {}
    for kind in ("net", "infiniband"):
        for path in sorted((sys / "class" / kind).glob("*")):
            if not (path / "device").exists() or _VIRTUAL in str(path.resolve()):
                continue
            with suppress(OSError):
                if kind == "net" and (path / "operstate").read_text().strip() == "down":
                    continue
            cards[path.name] = _node_of(path / "device")
    return cards


def _node_of(device: Path) -> int | None:
    with suppress(OSError, ValueError):
        node = int((device / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _gpus(sys: Path) -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        peers = frozenset(
            other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)
        )
        found.append(Gpu(_node_of(sys / "bus/pci/devices" / address), peers, _num_nvlinks(str(properties.uuid))))
    return found


def _num_nvlinks(uuid: str) -> int:
    """Returns the active NVLinks of a GPU; 0 without NVML."""
    if importlib.util.find_spec("pynvml") is None:
        return 0
    pynvml: Any = importlib.import_module("pynvml")
    count = 0
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            with suppress(pynvml.NVMLError):  # this GPU has fewer links
                count += pynvml.nvmlDeviceGetNvLinkState(handle, link)
    return count
