"""Tests examples/monitoring with a real Prometheus that scrapes two ranks of a training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import make_batches, make_model
from torch import nn

import drivetrain
from drivetrain.monitor import Monitor
from drivetrain.monitor.sinks.prometheus import Prometheus
from ports import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
LIMIT_S = 90
UNPACKED = Path(__file__).parents[2] / "build/prometheus/usr/bin"  # by unpack_prometheus.sh
PROGRAMS = {
    name: shutil.which(name, path=os.pathsep.join([os.environ["PATH"], str(UNPACKED)]))
    for name in ("prometheus", "promtool")
}
pytestmark = pytest.mark.skipif(
    None in PROGRAMS.values(),
    reason="prometheus is not installed: apt-get install prometheus, or tests/monitor/unpack_prometheus.sh",
)


def train_until(end: Path, ports: list[int]) -> None:
    """Trains with a slow loader on rank 1 until the file exists."""
    rank = dist.get_rank()
    model = drivetrain.DistributedDataParallel(make_model(), report_hang_after=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batches() -> Iterator[Any]:
        for batch in make_batches(1) * 100_000:
            time.sleep(0.02 if rank == 1 else 0.001)
            yield batch

    with Monitor(model, optimizer, to=[Prometheus(ports[rank])], progress=False, peak_flops=1e9) as monitor:
        for inputs, targets in monitor(batches()):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            is_done = torch.tensor([end.exists()])
            with monitor.phase("communication"):
                dist.broadcast(is_done, 0)
            if is_done:
                break


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())["data"]
    except OSError:  # Prometheus is starting, or a query is wrong
        return {}


def test_a_real_prometheus(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    first, second, own = free_ports(3)
    config = (EXAMPLES / "prometheus.yml").read_text().replace("5s", "1s")
    config = config.replace("127.0.0.1:9400", f"127.0.0.1:{first}").replace("127.0.0.1:9401", f"127.0.0.1:{second}")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(EXAMPLES / "alerts.yml", tmp_path)
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    queries = {panel["title"]: panel["targets"][0]["expr"] for panel in dashboard["panels"]}
    errors: list[BaseException] = []

    def train() -> None:
        try:
            on_ranks(train_until, tmp_path / "end", [first, second])
        except BaseException as error:
            errors.append(error)

    command = [
        str(PROGRAMS["prometheus"]),
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log)
    training = threading.Thread(target=train)
    training.start()
    try:
        address = f"http://127.0.0.1:{own}/api/v1"
        shown: dict[str, Any] = {}
        rules: list[Any] = []
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and not errors:
            for title, expression in queries.items():
                query = urllib.parse.urlencode({"query": expression})
                if result := ask(f"{address}/query?{query}").get("result"):
                    shown[title] = result
            groups = ask(f"{address}/rules").get("groups", [])
            rules = [rule for group in groups for rule in group["rules"]]
            has_both_ranks = len(shown.get("Median step", ())) == 2
            if has_both_ranks and len(shown) == len(queries) and rules and all(r["health"] == "ok" for r in rules):
                break
            time.sleep(0.5)
    finally:
        (tmp_path / "end").touch()
        training.join(LIMIT_S)
        server.kill()
        server.wait()
        log.close()
    assert not errors
    assert shown.keys() == queries.keys(), (tmp_path / "log").read_text()[-2000:]
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(
        ("TrainingStalled", "RankDown", "WaitingForData", "SlowRank", "EventsDropped"), "ok"
    )
    ranks = {one["metric"]["rank"] for one in shown["Median step"]}
    assert ranks == {"0", "1"}
    (slow,) = shown["Slow rank"]
    assert (slow["metric"]["rank"], slow["metric"]["phase"]) == ("1", "data")
    shares = {one["metric"]["phase"]: float(one["value"][1]) for one in shown["Where the time goes"]}
    assert sum(shares.values()) == pytest.approx(1.0)


def test_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    done = subprocess.run(
        [str(PROGRAMS["promtool"]), "test", "rules", "alerts_test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
