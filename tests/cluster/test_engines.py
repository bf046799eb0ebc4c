"""Runs the scripts of examples/cluster on real engines: torchrun over two hosts, SLURM's daemons, and Ray Train.

`make cluster` runs them. Elsewhere they skip, as they take minutes and need packages that no test extra installs.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
TIMEOUT_S = 240
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    "OMP_NUM_THREADS": "1",
    "RANKS_PER_HOST": "1",
}

pytestmark = pytest.mark.skipif(
    "DRIVETRAIN_CLUSTER" not in os.environ, reason="takes minutes: `make cluster` runs it (DRIVETRAIN_CLUSTER=1)"
)


# ---- torchrun.


def test_torchrun_over_two_hosts(tmp_path: Path) -> None:
    """Two launchers on this machine take the place of two hosts. The second run goes on from the first one's state."""
    for steps in (5, 10):
        port, output = free_port(), tmp_path / f"output-{steps}"
        command = [str(FOLDER / "torchrun.sh"), "--steps", str(steps), "--checkpoints", str(tmp_path / "checkpoints")]
        variables = {**ENVIRONMENT, "NUM_HOSTS": "2", "FIRST_HOST": "localhost", "PORT": str(port)}
        with output.open("wb") as file:
            hosts = [subprocess.Popen(command, env=variables, stdout=file, stderr=file) for _ in range(2)]
            try:
                codes = [host.wait(TIMEOUT_S) for host in hosts]
            finally:
                for host in hosts:
                    host.kill()
                    host.wait()
        assert codes == [0, 0], output.read_text()
        assert re.search(rf"^2 ranks, {steps} steps: loss \d+\.\d+$", output.read_text(), re.MULTILINE)


# ---- SLURM.

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
# The two nodes are daemons on this machine. Nothing is accounted, and authentication has a key of its own.
CONFIGURATION = """
ClusterName=drivetrain
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
NodeName=node[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{last_port}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Starts SLURM's daemons for two nodes on this machine, and returns the environment of its commands."""
    variables = {**ENVIRONMENT, "PATH": f"{ENVIRONMENT['PATH']}:/usr/sbin"}
    missing = [name for name in DAEMONS if shutil.which(name, path=variables["PATH"]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons are started as root only")
    host, first = socket.gethostname().split(".")[0], free_port()
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=tmp_path, ports=(free_port(), first), last_port=first + 1)
    )
    (tmp_path / "state").mkdir()
    key = tmp_path / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    variables["SLURM_CONF"] = str(configuration)
    munge = {
        "key-file": key,
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "seed",
    }
    options = [f"--{name}={tmp_path / value}" for name, value in munge.items()]
    pid_files = [tmp_path / name for name in ("slurmd.node0.pid", "slurmd.node1.pid", "slurmctld.pid", "munged.pid")]
    try:
        for command in (
            ["munged", "--force", *options],
            ["slurmctld"],
            ["slurmd", "-N", "node0"],
            ["slurmd", "-N", "node1"],
        ):
            subprocess.run(command, env=variables, check=True, timeout=30)
        deadline = time.monotonic() + 60
        while not re.search(r"\b2 +idle\b", sinfo(variables)):
            assert time.monotonic() < deadline, f"the nodes did not come up within 60 s:\n{sinfo(variables)}"
            time.sleep(0.5)
        yield variables
    finally:
        for file in pid_files:
            if file.exists():
                stop(int(file.read_text()))


def sinfo(variables: dict[str, str]) -> str:
    return subprocess.run(["sinfo"], env=variables, capture_output=True, text=True, check=False, timeout=60).stdout


def stop(process_id: int) -> None:
    """Ends a daemon that this test started, and waits for its end."""
    try:
        os.kill(process_id, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            os.kill(process_id, 0)
            time.sleep(0.1)
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:  # it has ended
        return


def test_slurm_runs_the_batch_script_on_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    command = [
        "sbatch",
        "--wait",
        "--nodes",
        "2",
        "--output",
        str(output),
        str(FOLDER / "slurm.sbatch"),
        "--steps",
        "5",
    ]
    done = subprocess.run(
        command, env=slurm, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    text = output.read_text() if output.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert re.search(r"^2 ranks, 5 steps: loss \d+\.\d+$", text, re.MULTILINE), text


# ---- Ray Train.


def test_ray_trains_on_two_workers(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'drivetrain[cluster]'")
    # A local cluster needs no token, which Ray would otherwise write into the home folder.
    variables = {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled"}
    for launcher in ([], ["-m", "drivetrain", "run"]):
        done = subprocess.run(
            [sys.executable, *launcher, str(FOLDER / "ray_train.py"), "--steps", "5"],
            env=variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout
        lines = dict(re.findall(r"rank (\d) of 2: (weights sum to \S+, wrapped by \S+)", done.stdout))
        assert set(lines) == {"0", "1"}, done.stdout
        assert lines["0"] == lines["1"]
        assert lines["0"].endswith("wrapped by drivetrain.ddp.distributed.DistributedDataParallel")
        said = "Ray's workers are processes that drivetrain run does not reach" in done.stdout
        assert said == bool(launcher), done.stdout
