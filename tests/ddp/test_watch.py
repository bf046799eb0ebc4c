"""Hang reports and straggler times on real ranks, and the life of the watchdog thread."""

import contextlib
import gc
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_store as store

from ddp_cases import SMALL_BUCKETS, OnRanks, message_of, script_ranks
from drivetrain import DistributedDataParallel as DDP
from drivetrain import frames
from drivetrain.ddp import control_block, hang_reports
from drivetrain.ddp.control_block import ControlBlock
from drivetrain.monitor.hangs import Places
from polling import wait_until
from ranks import RankPool, run_on

LIMIT_S = 1.0  # on a busy machine a rank must be heard of within half of it
LATEST = timedelta(seconds=30)  # how long a late rank waits for the reports of the others


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(10, 10)
        self.sleep_s = 0.0
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleep_s)
        if self.is_late:
            store().wait(reports_of_others(), LATEST)
        return self.mlp(x).tanh()


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(3)])


def reports_of_others() -> list[str]:
    """Returns the keys that the other ranks set with their first reports."""
    return [f"report of {rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def step_with(model: DDP) -> None:
    model(torch.ones(2, 10)).sum().backward()


@contextlib.contextmanager
def reports(tell_wrappers: bool = False) -> Iterator[list[str]]:
    """Collects what this rank logs at WARNING and above, and sets a key for the late ranks.

    Reports name the wrapper where a process has several, and other tests may have left some in caches of torch.compile.
    Only tell_wrappers=True keeps these names.
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        message = record.getMessage()
        store().set(f"report of {dist.get_rank()}", "")
        messages.append(message if tell_wrappers else re.sub(r" of DistributedDataParallel \d+ \(\w+\)", "", message))

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("drivetrain")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def watching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drivetrain-watch"]


def line_at(report: str) -> str:
    """Returns the line of this file that the report names."""
    found = re.search(r"ddp/test_watch\.py:(\d+) in", report)
    assert found, report
    return Path(__file__).read_text().splitlines()[int(found[1]) - 1]


# ---- Reports.


def late_in_a_module(options: dict[str, Any], hook: Callable[..., Any] | None) -> list[str]:
    model = DDP(blocks(), report_hang_after=LIMIT_S, **SMALL_BUCKETS, **options)
    if hook:
        model.register_comm_hook(None, hook)
    with reports() as messages:
        for step in range(1, 5):
            model.module[1].is_late = step == 3 and dist.get_rank() == 1
            step_with(model)
    return messages


def synchronous_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({"transport": "shm"}, None),
        ({"transport": "torch"}, None),
        ({"transport": "shm", "find_unused_parameters": True}, None),
        ({"transport": "torch", "static_graph": True}, None),
        ({"transport": "torch"}, default_hooks.allreduce_hook),
        ({"transport": "shm"}, synchronous_hook),
    ],
)
def test_names_what_waits_for_whom_and_where(on_ranks: OnRanks, options: Any, hook: Any) -> None:
    waiting, late = on_ranks(late_in_a_module, options, hook)
    assert late == []
    assert re.fullmatch(
        r"rank 0 has waited [\d.]+ s: bucket 0 of \d \[2\.mlp\.\w+, [\w., ]+\] of step 3 waits for rank 1, "
        r"last seen in 1 \(ddp/test_watch\.py:\d+ in forward\)",
        waiting[0],
    ), waiting
    assert "wait(reports_of_others(), LATEST)" in line_at(waiting[0])
    assert len(waiting) == 1


def late_twice() -> list[str]:
    """A wait that was reported ends, as for an evaluation of one rank, and the next one takes as long."""
    model = DDP(blocks(), report_hang_after=LIMIT_S)
    with reports() as messages:
        for step in range(4):
            model.module[1].is_late = step == 1 and dist.get_rank() == 1
            model.module[1].sleep_s = 1.5 * LIMIT_S if step == 2 and dist.get_rank() == 1 else 0.0
            step_with(model)
    return messages


def test_a_wait_like_an_earlier_one_is_not_reported_again(on_ranks: OnRanks) -> None:
    waiting, _ = on_ranks(late_twice)
    assert [re.search(r"of step (\d)", message)[1] for message in waiting] == ["2"]  # type: ignore[index]


def late_outside_the_model() -> list[str]:
    model = DDP(nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 3)), report_hang_after=LIMIT_S)
    with reports() as messages:
        for step in range(1, 4):
            if step == 3 and dist.get_rank() == 0:
                time.sleep(1.8 * LIMIT_S)  # an input that is long in coming
            step_with(model)
    return messages


def test_names_a_wait_in_forward(on_ranks: OnRanks) -> None:
    late, waiting = on_ranks(late_outside_the_model)
    assert late == []
    assert re.fullmatch(
        r"rank 1 has waited [\d.]+ s: the broadcast of buffers of step 3 waits for rank 0, "
        r"last seen at ddp/test_watch\.py:\d+ in late_outside_the_model",
        waiting[0],
    ), waiting
    assert "an input that is long in coming" in line_at(waiting[0])
    assert len(waiting) == 1  # the next would come at twice the limit


def left_out_a_step() -> list[str]:
    model = DDP(blocks(), report_hang_after=LIMIT_S, **SMALL_BUCKETS)
    with reports() as messages:
        for step in range(1, 6):
            if step == 2 and dist.get_rank() == 1:
                continue
            step_with(model)
        if dist.get_rank() == 1:
            store().wait(reports_of_others(), LATEST)
            step_with(model)
    return messages


def test_names_a_rank_that_left_out_a_step(on_ranks: OnRanks) -> None:
    waiting, _ = on_ranks(left_out_a_step)
    assert "of step 5 waits for rank 1, last seen at ddp/test_watch.py:" in waiting[0]
    assert "in left_out_a_step" in waiting[0]


def a_chain_of_waits() -> list[str]:
    """Makes rank 2 late for a group of ranks 1 and 2. Rank 0 waits for rank 1, which waits in that group."""
    pair = dist.new_group([1, 2])
    world = DDP(blocks(), report_hang_after=LIMIT_S, transport="torch")
    with reports(tell_wrappers=True) as messages:
        if dist.get_rank() > 0:
            inner = DDP(blocks(), report_hang_after=LIMIT_S, process_group=pair)
            assert len(watching_threads()) == 1
            inner.module[2].is_late = dist.get_rank() == 2
            step_with(inner)
        step_with(world)
    return messages


def test_two_wrappers_and_a_subgroup(on_three_ranks: OnRanks) -> None:
    first, second, third = on_three_ranks(a_chain_of_waits)
    assert third == []
    assert re.search(
        r"^rank 1 has waited .* of step 1 of DistributedDataParallel \d+ \(Sequential\) waits for rank 2, "
        r"last seen in 2 \(ddp/test_watch",
        second[0],
    ), second
    assert re.search(r"^rank 0 has waited .* waits for rank 1, last seen at .*; for rank 2, last seen at", first[0]), (
        first
    )


def hangs_in_join(hanging: int) -> list[str]:
    """Lets rank 1 run out of inputs after two steps. A rank then hangs."""
    model = DDP(blocks(), report_hang_after=LIMIT_S, **SMALL_BUCKETS)
    with reports() as messages, model.join():
        for step in range(6 if dist.get_rank() == 0 else 2):
            model.module[1].is_late = step == 4 and hanging == 0
            step_with(model)
        if dist.get_rank() == hanging == 1:
            store().wait(reports_of_others(), LATEST)  # on its way out
    return messages


@pytest.mark.parametrize(
    ("hanging", "report"),
    [
        (
            0,
            r"rank 1 has waited [\d.]+ s: (bucket 0 of \d \[2\.mlp\.\w+, [\w., ]+\]|the [a-z, ]+) of step 5 waits "
            r"for rank 0, last seen in 1 \(ddp/test_watch\.py:\d+ in forward\)",
        ),
        (
            1,
            r"rank 0 has waited [\d.]+ s: the count of ranks that still have inputs of step 3 waits for rank 1, "
            r"last seen at ddp/test_watch\.py:\d+ in hangs_in_join",
        ),
    ],
)
def test_names_a_wait_in_join(on_ranks: OnRanks, hanging: int, report: str) -> None:
    messages = on_ranks(hangs_in_join, hanging)
    assert messages[hanging] == []
    assert re.fullmatch(report, messages[1 - hanging][0]), messages


RANK = """
    import math, os, signal, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02, report_hang_after=1)
"""


STOPPED = """
    for step in range(4):
        if step == 3 and rank == int(os.environ["STOPPED"]):
            time.sleep(0.3)  # until its thread has published
            os.kill(os.getpid(), signal.SIGSTOP)
        model(torch.randn(4, 64)).sum().backward()
"""


def report_and_error(tmp_path: Path, transport: str, stopped: int) -> tuple[str, str]:
    """Returns rank 1's first report of a stopped rank, and its output after that rank was killed."""
    environment = {"DRIVETRAIN_TRANSPORT": transport, "STOPPED": str(stopped)}
    with script_ranks(tmp_path, RANK + STOPPED, 3, **environment) as ranks:
        lines: list[str] = []
        while not lines or "has waited" not in lines[-1]:
            lines.append(ranks[1].stderr.readline())
            assert lines[-1], f"rank 1 has ended without a report: {''.join(lines)}"
        ranks[stopped].kill()
        _, error = ranks[1].communicate(timeout=60)
    return lines[-1], error


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_a_stopped_rank_and_the_error_after_it(tmp_path: Path, transport: str) -> None:
    report, error = report_and_error(tmp_path, transport, stopped=2)
    said = r"of step 4 waits for rank 2, which has not been heard of for [\d.]+ s, last seen "
    said += r"(at \S+|in .*\()\S*train\.py:\d+ in "
    assert re.search(said, report), report
    after = error.partition("The last report before that: ")[2]
    assert re.match("rank 1 has waited .*" + said, after), error


def test_the_rank_that_serves_the_store_is_stopped(tmp_path: Path) -> None:
    report, error = report_and_error(tmp_path, "shm", stopped=0)
    said = "of step 4 waits; for which rank is not known, as the process group's store does not answer"
    assert said in report
    assert said in error.partition("The last report before that: ")[2]


KILLED = """
    killed = int(os.environ["KILLED"])
    if killed == 0:  # which serves the store, too, and whose buffers the others wait for
        model = DDP(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), report_hang_after=1)
    for step in range(6):
        while step == 2 and any(map(math.isnan, model.stragglers())):
            time.sleep(0.05)  # until each has heard of the other
        if step == 3 and rank == killed:
            print(f"pid {os.getpid()}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 64)).sum().backward()
"""


@pytest.mark.parametrize(
    ("killed", "awaited"),
    [
        (1, r"the all-reduce of bucket \d+ of \d+ \[.*\] failed in synchronized step 4"),
        (0, r"the broadcast of buffers has failed\."),
    ],
)
def test_a_killed_rank_is_named(tmp_path: Path, killed: int, awaited: str) -> None:
    environment = {"DRIVETRAIN_TRANSPORT": "torch", "KILLED": str(killed)}
    with script_ranks(tmp_path, RANK + KILLED, 2, **environment) as ranks:
        _, said_before = ranks[killed].communicate(timeout=60)
        _, error = ranks[1 - killed].communicate(timeout=60)
    pid = re.search(r"pid (\d+)", said_before)
    assert pid, said_before
    assert re.search(rf"drivetrain: {awaited}", error), error
    last_seen = r"last seen (at \S+|in .*\()\S*train\.py:\d+ in .*in step \d\."
    assert re.search(rf"Rank {killed} has ended: its process {pid[1]} is gone, {last_seen}", error), error


# ---- Many hosts.


def late_on_another_host() -> list[str]:
    rank = dist.get_rank()
    host_name, control_block.host_name = control_block.host_name, lambda: f"host {rank // 2}"
    try:
        model = DDP(blocks(), report_hang_after=LIMIT_S, transport="torch")
    finally:
        control_block.host_name = host_name
    with reports() as messages:
        for step in range(1, 4):
            model.module[1].is_late = step == 3 and rank == 3
            step_with(model)
    return messages


def test_names_a_late_rank_of_another_host(on_four_ranks: OnRanks) -> None:
    *waiting, late = on_four_ranks(late_on_another_host)
    assert late == []
    for messages in waiting:
        assert re.search(r"of step 3 waits for rank 3, last seen in 1 \(ddp/test_watch\.py:\d+ in", messages[0])


class CountingStore:
    """Counts the values that are read from a store."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.num_read += len(keys)
        return self._store.multi_get(keys)


def record_of(rank: int, beat: int, has_failed: bool = False) -> control_block.RankRecord:
    process: control_block.Process = {"host": "", "pid": rank, "started": 0}
    where = {"awaited": "", "where": "at x.py:1", "process": process, "has_failed": has_failed}
    return control_block.RankRecord(beat=beat, step=rank, position=3, wait_s=0.5, **where)


def blocks_of_ranks(
    num_ranks: int, per_host: int, beat_s: float
) -> tuple[CountingStore, list[control_block.ControlBlock]]:
    """Makes the control blocks of ranks that have published twice."""
    store = CountingStore()
    made = [
        ControlBlock(store, "", range(num_ranks), rank, f"host {rank // per_host}", beat_s) for rank in range(num_ranks)
    ]
    for rank in reversed(range(num_ranks)):  # so that the last of each host makes the summary
        made[rank].publish(record_of(rank, 1))
    for rank in range(num_ranks):
        made[rank].publish(record_of(rank, 2))
    return store, made


def test_a_waiting_rank_of_1024_reads_its_own_host_and_summaries() -> None:
    store, made = blocks_of_ranks(1024, 8, beat_s=60)
    block = made[500]
    assert block.read()
    assert [seen and seen.step for seen in block.seen] == list(range(1024))
    assert [rank for rank, record in enumerate(block.last) if record] == list(range(496, 504))
    store.num_read = 0
    assert block.read()
    assert store.num_read == 8 + 127


class SlowToEnd(threading.Thread):
    def run(self) -> None:
        super().run()
        time.sleep(0.2)


def test_a_question_may_follow_an_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = blocks_of_ranks(2, 2, beat_s=60)
    monkeypatch.setattr(threading, "Thread", SlowToEnd)
    assert all(made[0].read() for _ in range(3))


def test_ranks_that_end_over_another_ranks_end_are_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = blocks_of_ranks(8, 8, beat_s=60)
    for rank in (1, 2, 3, 4, 5, 7):
        made[rank].publish(record_of(rank, 3, has_failed=True))
    made[0].read()
    monkeypatch.setattr(control_block, "has_ended", lambda process: True)
    reporter = object.__new__(hang_reports.HangReporter)
    reporter._block = made[0]
    assert re.findall(r"Rank (\d) has ended", reporter._describe_ended()) == ["6", "1", "2", "3"]
    assert reporter._describe_ended().endswith("3 more have ended.")


def test_a_summary_whose_maker_has_ended_is_done_without() -> None:
    _, made = blocks_of_ranks(12, 4, beat_s=0)
    block = made[0]
    assert block.read()
    for rank in (8, 9, 10):  # not 11, which makes the summary
        made[rank].publish(record_of(rank, 3))
    assert block.read()
    assert [seen and seen.beat for seen in block.seen[8:]] == [3, 3, 3, 2]
    assert block.last[8] == record_of(8, 3)


def test_the_end_of_another_hosts_rank_is_in_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = blocks_of_ranks(4, 2, beat_s=60)
    made[2].read()
    with monkeypatch.context() as on_its_host:
        on_its_host.setattr(control_block, "has_ended", lambda process: process["pid"] == 3)
        made[2].publish(record_of(2, 3))  # in the place of rank 3, which made the summary
    assert made[0].read()
    reporter = object.__new__(hang_reports.HangReporter)
    reporter._block = made[0]
    assert reporter._describe_ended() == "Rank 3 has ended: its process 3 is gone, last seen at x.py:1 in step 3."
    assert "rank 3 has ended: its process 3 is gone, last seen at x.py:1" in Places(made[0], 60).others(3)


# ---- What the thread leaves, and when there is none.

EARLY_EXIT = """
    model(torch.randn(4, 64)).sum().backward()
    if rank == 1:
        time.sleep(1.5)  # rank 0 served the store
"""


def test_a_rank_that_ends_first_leaves_the_others_in_peace(tmp_path: Path) -> None:
    with script_ranks(tmp_path, RANK + EARLY_EXIT, 2) as ranks:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert errors == ["", ""]


EXIT_WHILE_ASKING = """
    import atexit, threading
    from drivetrain.ddp import control_block, hang_reports

    has_hung_up = control_block._has_hung_up

    def slow(store):
        time.sleep(0.7)
        return has_hung_up(store)

    def tell_threads():
        sys.stderr.write(" ".join(t.name for t in threading.enumerate() if t.name.startswith("drivetrain-watch")))

    atexit.unregister(hang_reports._end_at_exit)  # of the model above
    atexit.register(tell_threads)
    atexit.register(hang_reports._end_at_exit)  # the last to be registered is called first
    control_block._has_hung_up = slow
    models = [DDP(nn.Linear(4, 4)) for _ in range(5)]
"""


def test_no_thread_asks_the_store_after_the_exit_hooks(tmp_path: Path) -> None:
    with script_ranks(tmp_path, RANK + EXIT_WHILE_ASKING, 2) as ranks:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert errors == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]


class Still:
    def stand(self, secret: int) -> dict[str, Any]:
        mine = locals()
        time.sleep(1)
        return mine


@run_on(2)
def test_frames_stay_as_they_are() -> None:
    """Checks that reading frames changes nothing in them, as a debugger and locals() share one dict."""
    model = DDP(blocks(), report_hang_after=0.2)
    step_with(model)
    assert Still().stand(5)["secret"] == 5
    assert dict(Still().stand(6)).keys() == {"self", "secret"}


def threads_come_and_go() -> None:
    assert watching_threads() == []
    off = DDP(blocks(), report_hang_after=0)
    assert watching_threads() == []
    assert "report_hang_after is 0" in message_of(RuntimeError, off.stragglers)
    models = [DDP(blocks()) for _ in range(2)]
    assert len(watching_threads()) == 1
    child = os.fork()
    if child == 0:
        os._exit(len(watching_threads()))
    assert os.waitpid(child, 0)[1] == 0
    step_with(models[0])
    del models[0]
    gc.collect()
    assert len(watching_threads()) == 1
    del models, off
    gc.collect()
    wait_until(lambda: watching_threads() == [], "end of the watching threads")
    again = DDP(blocks(), report_hang_after=float("inf"))
    assert watching_threads() == []
    del again


def test_the_thread_lives_as_long_as_there_is_something_to_watch(tmp_path: Path) -> None:
    pool = RankPool(2, tmp_path)  # where no other test has left a model
    try:
        pool.run(threads_come_and_go)
    finally:
        pool.close()


def test_import_and_a_single_rank_start_no_thread(tmp_path: Path) -> None:
    script = (
        "import threading, sys, drivetrain, torch, torch.distributed as dist; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
        "model = drivetrain.DistributedDataParallel(torch.nn.Linear(3, 3)); "
        "assert model.stragglers() == [0.0]; sys.exit(threading.active_count() - 1)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class Holder:
    """Has a method that releases an object while the watchdog reads its frame."""

    def run(self, holds: threading.Event, go_on: threading.Event) -> bool:
        value = Holder()
        gone = weakref.ref(value)
        holds.set()
        assert go_on.wait(20)
        del value
        return gone() is None

    def forward(self) -> None:
        holds, go_on, results = threading.Event(), threading.Event(), []
        thread = threading.Thread(target=lambda: results.append(self.run(holds, go_on)))
        thread.start()
        assert holds.wait(20)
        module = nn.Linear(1, 1)
        where = hang_reports._where(thread.ident or 0, {id(module): (weakref.ref(module), "layer")})
        go_on.set()
        thread.join()
        assert re.fullmatch(r"at ddp/test_watch.py:\d+ in run", where)
        assert results == [True]


def test_looking_at_a_frame_keeps_none_of_its_tensors() -> None:
    Holder().forward()


# ---- Stragglers.


def slow_rank(transport: str) -> list[float]:
    model = DDP(blocks(), report_hang_after=LIMIT_S, transport=transport, **SMALL_BUCKETS)
    model.module[0].sleep_s = 0.1 if dist.get_rank() == 1 else 0
    for _ in range(8):
        step_with(model)
    delays: list[float] = []
    if dist.get_rank() == 0:  # alone
        time.sleep(LIMIT_S / 2)
        wait_until(lambda: not any(map(math.isnan, model.stragglers())), "wait of every rank")
        delays = model.stragglers()
    dist.barrier()
    return delays


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_stragglers_names_the_slow_rank(on_three_ranks: OnRanks, transport: str) -> None:
    delays = on_three_ranks(slow_rank, transport)[0]
    assert len(delays) == 3
    assert delays[1] == max(delays)
    assert delays[1] > 2 * max(delays[0], delays[2])
    assert min(delays) == 0


# ---- Arguments.


@run_on(2)
def test_bad_limits_are_named() -> None:
    net = blocks()
    for bad in (-1, float("nan")):
        assert f"report_hang_after is {bad}" in message_of(ValueError, lambda bad=bad: DDP(net, report_hang_after=bad))
    assert "report_hang_after is a str" in message_of(TypeError, lambda: DDP(net, report_hang_after="soon"))
    os.environ[hang_reports.VARIABLE] = "soon"
    try:
        assert f"{hang_reports.VARIABLE} is 'soon'" in message_of(ValueError, lambda: DDP(net))
        os.environ[hang_reports.VARIABLE] = "0"
        assert DDP(net).reducer.hang_reporter is None
        assert DDP(net, report_hang_after=2).reducer.hang_reporter is not None
    finally:
        del os.environ[hang_reports.VARIABLE]
    differs = message_of(RuntimeError, lambda: DDP(net, report_hang_after=1 + dist.get_rank()))
    assert "argument 'report_hang_after' differs: rank 0: 1.0; rank 1: 2.0" in differs


def test_host_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer stopped each question for five seconds."""
    store, lookups = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), list[Any]()
    monkeypatch.setattr(control_block, "_tcp_store_in", lambda store: lookups.append(store) or store)
    block = ControlBlock(store, "drivetrain/", [0], 0, "host", 1.0)
    assert [block.ask(lambda store: store.add("count", 1)) for _ in range(3)] == [1, 2, 3]
    assert len(lookups) == 1


def test_frames_are_read_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destructor that gave up the GIL in a collection let the other thread leave the frame that was being read."""
    collects: list[bool] = []
    for module, name in ((sys, "_current_frames"), (frames, "stack_of")):
        read = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, read=read: (collects.append(gc.isenabled()), read(*args))[1])
    assert frames.place_of(threading.current_thread())
    assert collects == [False, False]
    assert gc.isenabled()
