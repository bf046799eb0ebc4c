"""Tests that the files of examples/monitoring name each other as they lie in docker-compose's containers."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"


def read(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((EXAMPLES / name).read_text())


def mounts(service: str) -> dict[str, PurePosixPath]:
    """Returns the place in the container of each file of this folder."""
    volumes = [volume.split(":") for volume in read("docker-compose.yml")["services"][service]["volumes"]]
    assert {mode for _, _, mode in volumes} == {"ro"}
    return {source.removeprefix("./"): PurePosixPath(target) for source, target, _ in volumes}


def option(command: list[str], name: str) -> str:
    (value,) = [text.removeprefix(f"--{name}=") for text in command if text.startswith(f"--{name}=")]
    return value


def test_every_file_is_mounted_once() -> None:
    mounted = [*mounts("prometheus"), *mounts("grafana")]
    assert sorted([*mounted, "docker-compose.yml"]) == sorted(file.name for file in EXAMPLES.iterdir())


def test_prometheus_finds_its_files() -> None:
    command, files = read("docker-compose.yml")["services"]["prometheus"]["command"], mounts("prometheus")
    assert option(command, "config.file") == str(files["prometheus.yml"])
    # Prometheus reads the names of rule files from its configuration's folder.
    (rules,) = read("prometheus.yml")["rule_files"]
    assert files["prometheus.yml"].parent / rules == files["alerts.yml"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services, files = read("docker-compose.yml")["services"], mounts("grafana")
    (source,) = read("grafana-datasource.yml")["datasources"]
    assert source["url"] == "http://" + option(services["prometheus"]["command"], "web.listen-address")
    (provider,) = read("grafana-dashboards.yml")["providers"]
    assert PurePosixPath(provider["options"]["path"]) == files["grafana-dashboard.json"].parent
    provisioning = PurePosixPath("/etc/grafana/provisioning")
    assert files["grafana-datasource.yml"].parent == provisioning / "datasources"
    assert files["grafana-dashboards.yml"].parent == provisioning / "dashboards"
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    (variable,) = dashboard["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    expected = {"type": source["type"], "uid": f"${{{variable['name']}}}"}
    assert all(panel["datasource"] == expected for panel in dashboard["panels"])


def test_nothing_listens_beyond_this_machine() -> None:
    services = read("docker-compose.yml")["services"]
    assert {service["network_mode"] for service in services.values()} == {"host"}
    assert option(services["prometheus"]["command"], "web.listen-address").startswith("127.0.0.1:")
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
