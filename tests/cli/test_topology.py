"""Tests the doctor's map of NUMA nodes, network cards and GPUs, over a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.cli.topology import Gpu, check_topology


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two NUMA nodes; a card on each, a card that is down, an InfiniBand card, and an interface without a card."""
    files = {
        "devices/system/node/node0/cpulist": "0-15\n",
        "devices/system/node/node1/cpulist": "16-31\n",
        "class/net/eth0/device/numa_node": "0\n",
        "class/net/eth0/operstate": "up\n",
        "class/net/eth1/device/numa_node": "1\n",
        "class/net/eth1/operstate": "down\n",
        "class/net/lo/operstate": "unknown\n",
        "class/net/ens5/device/numa_node": "-1\n",
        "class/net/ens5/operstate": "up\n",
        "class/infiniband/mlx5_0/device/numa_node": "0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_map_names_nodes_and_cards(sysfs: Path) -> None:
    finding = check_topology(sysfs, [])
    assert finding.status == "PASS"
    assert finding.text == (
        "NUMA node 0: cores 0-15; NUMA node 1: cores 16-31; ens5: near no NUMA node; eth0: near node 0; "
        "mlx5_0: near node 0"
    )


def test_gpus_show_node_links_and_peers(sysfs: Path) -> None:
    finding = check_topology(sysfs, [Gpu(0, frozenset({1}), 18), Gpu(0, frozenset({0}), 18)])
    assert finding.status == "PASS"
    assert "GPU 1: near node 0, 18 NVLinks, P2P with 0" in finding.text


def test_a_gpu_without_peer_access_is_named(sysfs: Path) -> None:
    finding = check_topology(sysfs, [Gpu(0, frozenset({1})), Gpu(0)])
    assert finding.status == "WARN"
    assert "GPU 1 does not reach GPU 0 directly (P2P)" in finding.text
    assert "ACS" in finding.cure


def test_a_gpu_far_from_every_card_is_named(sysfs: Path) -> None:
    finding = check_topology(sysfs, [Gpu(0, frozenset({1})), Gpu(1, frozenset({0}))])
    assert finding.status == "WARN"
    assert "GPU 1 is on NUMA node 1, which has no network card" in finding.text
    assert "NCCL_IB_HCA" in finding.cure


def test_this_machine_passes() -> None:
    assert check_topology(gpus=[]).status == "PASS"
    assert check_topology(Path("/nowhere"), []).text == "NUMA nodes are not known"
