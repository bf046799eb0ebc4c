"""Tests what is read from NCCL's RAS, over a server that takes its protocol as strictly as NCCL 2.28.9 does."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drivetrain.ddp import nccl_ras

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv")
Answer = Callable[[int], Any]
PATIENCE_S = 2.5  # the server's thread may be late on a busy machine


class Server:
    """Answers one command per line. A status ends the connection, and a command that NCCL does not know is an error."""

    def __init__(self, answer: Answer, has_json: bool = True, delay_s: float = 0) -> None:
        self.answer, self.has_json, self.delay_s, self.num_statuses = answer, has_json, delay_s, 0
        self.commands: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, connection.makefile("r", newline="\n") as lines:
                for line in lines:
                    assert line.endswith("\n"), "NCCL waits for the end of a line"
                    self.commands.append(line.strip())
                    if line.strip().lower() in ("status", "verbose status"):
                        time.sleep(self.delay_s)
                        text = self._status()
                        try:
                            for begin in range(0, len(text), 997):  # in pieces
                                connection.sendall(text[begin : begin + 997].encode())
                        except BrokenPipeError:  # the client has given up
                            pass
                        break
                    connection.sendall((self._reply(line.strip().lower()) + "\n").encode())

    def _reply(self, command: str) -> str:
        if command.startswith("timeout ") and float(command.split()[1]) >= 0:
            return "OK"
        if command == "set format json" and self.has_json:
            self._is_json = True
            return "OK"
        return f"ERROR: Unknown command {command}"

    def _status(self) -> str:
        self.num_statuses += 1
        found = self.answer(self.num_statuses)
        return found if isinstance(found, str) else json.dumps(found, indent=2) + "\n"


def rank(number: int, error: int = 0, **counts: int) -> dict[str, Any]:
    status = {
        "init_state": 0,
        "async_error": error,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    place = {"host": "10.0.0.1", "pid": 100 + number, "cuda_dev": number, "nvml_dev": number}
    return {"rank": number, **place, "status": status, "collective_counts": dict.fromkeys(FUNCTIONS, 0) | counts}


def missing(number: int, unresponsive: bool, dead: bool) -> dict[str, Any]:
    place = {"host": "10.0.0.2", "pid": 100 + number, "cuda_dev": number, "nvml_dev": number}
    return {"rank": number, **place, "status": {"unresponsive": unresponsive, "considered_dead": dead}}


def status(*communicators: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "nccl_version": "2.28.9+cuda13.0",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-29 02:30:00",
        "communicators_count": len(communicators),
        "communicators": [
            {
                "hash": f"0x{7 + number:x}",
                "secondary_hash": "0x1:0x2",
                "size": len(ranks) + len(lost),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(lost),
                "ranks": ranks,
                "missing_ranks": lost,
            }
            for number, (ranks, lost) in enumerate(communicators)
        ],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(answer: Answer, **options: Any) -> Server:
        servers.append(Server(answer, **options))
        monkeypatch.setenv("NCCL_RAS_ADDR", servers[-1].address)
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("ranks", "lost", "expected"),
    [
        (
            [rank(0, AllReduce=13), rank(1, AllReduce=12)],
            [],
            "rank 1 (process 101 on 10.0.0.1) has made 12 of 13 AllReduce",
        ),
        (
            [rank(0, AllGather=5, ReduceScatter=4), rank(1, AllGather=4, ReduceScatter=4)],
            [],
            "rank 1 (process 101 on 10.0.0.1) has made 4 of 5 AllGather",
        ),
        ([rank(0, AllReduce=3)], [missing(1, True, True)], "rank 1 (process 101 on 10.0.0.2) is dead"),
        ([rank(0, AllReduce=3)], [missing(1, True, False)], "rank 1 (process 101 on 10.0.0.2) does not answer"),
        ([rank(0, AllReduce=3)], [missing(1, False, False)], "rank 1 (process 101 on 10.0.0.2) has left it"),
        ([rank(0, 6, AllReduce=3), rank(1, AllReduce=3)], [], "rank 0 (process 100 on 10.0.0.1) has NCCL error 6"),
        # Two ranks that made different collectives are each behind the other.
        (
            [rank(0, AllReduce=3), rank(1, Broadcast=1, AllReduce=2)],
            [],
            "rank 0 (process 100 on 10.0.0.1) has made 0 of 1 Broadcast; "
            "rank 1 (process 101 on 10.0.0.1) has made 2 of 3 AllReduce",
        ),
    ],
)
def test_what_is_wrong_is_named(served: Any, ranks: Any, lost: Any, expected: str) -> None:
    healthy = [rank(0, AllReduce=9), rank(1, AllReduce=9)], []
    server = served(lambda _: status(healthy, (ranks, lost)))
    assert nccl_ras.describe(PATIENCE_S) == f"NCCL says of the communicator 0x8 of 2 ranks: {expected}."
    assert server.commands == 2 * ["TIMEOUT 0.5", "SET FORMAT json", "STATUS"]


def test_healthy_ranks_are_not_named(served: Any) -> None:
    """Ranks in progress, and ranks that differ in sends alone, are healthy; so is a rank that catches up."""
    served(lambda _: status(([rank(0, 7, AllReduce=3, Send=2, SendRecv=1), rank(1, AllReduce=3, Recv=2)], [])))
    assert nccl_ras.describe(0.5) == ""
    served(lambda asked: status(([rank(0, AllReduce=13 + asked), rank(1, AllReduce=12 + asked)], [])))
    assert nccl_ras.describe(0.5) == ""


def test_many_ranks_are_counted(served: Any) -> None:
    served(lambda _: status(([rank(i, AllReduce=min(i, 9)) for i in range(10)], [])))
    said = nccl_ras.describe(PATIENCE_S)
    assert "rank 0 (process 100 on 10.0.0.1) has made 0 of 9 AllReduce; rank 1" in said
    assert said.endswith("rank 3 (process 103 on 10.0.0.1) has made 3 of 9 AllReduce; 5 more.")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "NCCL version 2.27.3\nJob summary\n", '{"communicators": [{}]}', "null"]
)
def test_an_answer_that_is_no_status_names_none(served: Any, text: str) -> None:
    served(lambda _: text)
    assert nccl_ras.describe(0.5) == ""


def test_older_versions_and_silent_servers_name_none(served: Any) -> None:
    served(lambda _: status(([rank(0, AllReduce=1), rank(1)], [])), has_json=False)
    assert nccl_ras.describe(0.5) == ""
    with pytest.raises(ValueError, match="expected OK twice"):
        nccl_ras.ask(0.5)
    served(lambda _: status(), delay_s=2)
    begin = time.monotonic()
    assert nccl_ras.describe(0.5) == ""
    assert time.monotonic() - begin < 1.5


def test_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"[::1]:{port}", "no colon", "127.0.0.1:", "127.0.0.1:99999"):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        assert nccl_ras.describe(0.5) == ""
