"""Tests that every nanosecond of a step belongs to one phase, and that a monitor changes no result."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Kept, make_batches, make_model, train, working
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import drivetrain
from drivetrain import _C
from drivetrain.monitor import Monitor
from drivetrain.monitor.collector import is_filling
from drivetrain.phases import LABELS, PHASES, number_of

NUM_PHASES = len(PHASES)
NAP_S = 0.02  # sleeps last at least as long; no upper bound is ever asserted
# A phase and the phases inside of it.
TREES = st.recursive(
    st.integers(0, NUM_PHASES - 1).map(lambda phase: (phase, ())),
    lambda inner: st.tuples(st.integers(0, NUM_PHASES - 1), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=8,
)


@pytest.fixture
def reader() -> Iterator[_C.TraceReader]:
    reader = _C.TraceReader(sees_forwards=True)
    yield reader
    reader.stop()


def walk(tree: Any) -> set[int]:
    phase, inner = tree
    _C.trace_begin(phase)
    seen = {phase}.union(*(walk(one) for one in inner))
    _C.trace_end(phase)
    return seen


def test_every_phase_has_a_label() -> None:
    assert set(LABELS) == set(PHASES)


@given(steps=st.lists(st.lists(TREES, max_size=5), min_size=1, max_size=4))
@settings(deadline=None)
def test_phases_of_any_nesting_add_up_to_the_step(steps: list[Any]) -> None:
    reader = _C.TraceReader(sees_forwards=True)
    try:
        _C.trace_step(0)
        phases_in = []
        for number, trees in enumerate(steps, 1):
            phases_in.append(set().union(*(walk(tree) for tree in trees)))
            _C.trace_step(number)
        accounts = reader.read()
    finally:
        reader.stop()
    assert [account.step for account in accounts] == list(range(1, len(steps) + 1))
    for account, phases in zip(accounts, phases_in, strict=True):
        assert account.is_complete
        assert sum(account.phase_ns) == account.wall_ns > 0
        # Time before, between and after outermost phases may belong to the host, and to no phase without records.
        assert {phase for phase, ns in enumerate(account.phase_ns) if ns} <= phases | {number_of("host")}
    for before, after in itertools.pairwise(accounts):
        assert before.begin_ns + before.wall_ns == after.begin_ns


@pytest.mark.parametrize("broken", ["unended", "unbegun", "crossed"])
def test_phases_that_do_not_nest_make_a_step_incomplete(reader: _C.TraceReader, broken: str) -> None:
    _C.trace_step(0)
    if broken == "unended":
        _C.trace_begin(1)
    elif broken == "unbegun":
        _C.trace_end(1)
    else:
        for call, phase in ((_C.trace_begin, 3), (_C.trace_begin, 4), (_C.trace_end, 3), (_C.trace_end, 4)):
            call(phase)
    _C.trace_step(1)
    _C.trace_step(2)
    first, second = reader.read()
    assert not first.is_complete
    assert sum(first.phase_ns) == first.wall_ns
    assert second.is_complete


def test_a_full_ring_refuses_and_counts_records(reader: _C.TraceReader) -> None:
    _C.trace_step(0)
    for _ in range(5000):
        walk((4, ()))
    refused = reader.num_refused()
    assert refused == 10_001 - 8192
    assert reader.read() == []
    _C.trace_step(1)
    _C.trace_step(2)
    first, second = reader.read()
    assert not first.is_complete
    assert second.is_complete
    assert reader.num_refused() == refused


def test_the_ring_is_read_before_evaluations_fill_it(reader: _C.TraceReader) -> None:
    """Batches of an evaluation, and micro-batches, have records but end no step."""
    capacity = 8192
    _C.trace_step(0)
    for _ in range(capacity // 4):
        walk((4, ()))
    reader.read()
    assert reader.num_read() == capacity // 2 + 1
    assert is_filling(0, reader.num_read(), 0.8)  # another look as late would find the ring half full
    assert is_filling(100, 900, 0.8)
    assert not is_filling(40, 400, 0.8)


def test_threads_that_do_not_train_do_not_count(reader: _C.TraceReader) -> None:
    """A thread that writes between the training thread's records, such as one that evaluates a copy of the model."""
    _C.trace_step(0)
    thread = threading.Thread(target=walk, args=((3, ((4, ()),)),))
    thread.start()
    thread.join()
    _C.trace_step(1)
    (account,) = reader.read()
    assert account.is_complete
    assert account.phase_ns[3] == account.phase_ns[4] == account.num_forwards == 0


def test_many_threads_write_at_once(reader: _C.TraceReader) -> None:
    _C.trace_step(0)
    threads = [threading.Thread(target=lambda: [walk((4, ())) for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _C.trace_step(1)
    (account,) = reader.read()
    assert account.is_complete
    assert reader.num_refused() == 0


def test_a_second_trace_is_refused(reader: _C.TraceReader) -> None:
    with pytest.raises(ValueError, match="a monitor is active already"):
        _C.TraceReader(sees_forwards=True)
    reader.stop()
    assert not _C.trace_is_on()
    _C.TraceReader(sees_forwards=True).stop()


@pytest.mark.parametrize("phase", [-1, NUM_PHASES])
def test_an_unknown_phase_is_refused(reader: _C.TraceReader, phase: int) -> None:
    with pytest.raises(ValueError, match=f"phase is {phase}, expected 0 to {NUM_PHASES - 1}"):
        _C.trace_begin(phase)
    with pytest.raises(ValueError, match="phase is 'wait', expected one of host, data"):
        number_of("wait")


# ---- The monitor around a loop.


def test_steps_add_up_to_the_loop() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        begin = time.perf_counter()
        train(model, optimizer, monitor(make_batches(30)))
        loop_s = time.perf_counter() - begin
    steps = kept.steps()
    assert [step["step"] for step in steps] == list(range(1, 31))
    for step in steps:
        assert step["complete"]
        assert step["samples"] == 6
        assert sum(step["phases"].values()) == pytest.approx(step["wall_s"], rel=1e-9)
        assert all(step["phases"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer", "host"))
    # The clocks of the loop are read outside of the first and last mark.
    assert sum(step["wall_s"] for step in steps) <= loop_s
    assert monitor.attributed_share == 1.0
    assert [event["type"] for event in kept.events if event["type"] != "step"][0::2][:1] == ["run"]
    assert kept.events[-1]["type"] == "end"


@pytest.mark.parametrize("slow", ["data", "forward", "loss", "backward", "clip", "optimizer", "log", "checkpoint"])
def test_time_lost_in_a_place_is_found_there(slow: str) -> None:
    phase = {"loss": "forward", "clip": "optimizer", "log": "host"}.get(slow, slow)

    def nap(place: str) -> None:
        if place == slow:
            time.sleep(NAP_S)

    Model, SGD = working(nap)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in make_batches(6):
            nap("data")
            yield batch

    kept, model = Kept(), Model(8, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for inputs, targets in monitor(batches()):
            outputs = model(inputs)
            nap("loss")
            nn.functional.mse_loss(outputs, targets).backward()
            nap("clip")
            optimizer.step()
            nap("log")
            with monitor.phase("checkpoint"):
                nap("checkpoint")
    for step in kept.steps():
        assert step["phases"][phase] >= NAP_S


def test_results_keep_their_bits() -> None:
    results = []
    for watched in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if watched:
            with Monitor(model, optimizer, progress=False, to=[]) as monitor:
                losses = train(model, optimizer, monitor(make_batches(12)))
        else:
            losses = train(model, optimizer, make_batches(12))
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for plain, watched_one in zip(*results, strict=True):
        assert torch.equal(plain, watched_one)


def test_everything_is_as_before_afterwards() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.autograd.backward
    threads = set(threading.enumerate())
    with Monitor(model, optimizer, progress=False) as monitor:
        assert torch.autograd.backward is not plain
        train(model, optimizer, monitor(make_batches(3)))
    assert torch.autograd.backward is plain
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert set(threading.enumerate()) <= threads
    assert not _C.trace_is_on()
    with pytest.raises(RuntimeError, match="has been entered before"), monitor:
        pass


@pytest.mark.parametrize("where", ["data", "forward", "backward", "loop"])
def test_an_error_of_the_loop_passes_through(where: str) -> None:
    class Oops(Exception):
        pass

    def oops(place: str) -> None:
        if place == where:
            raise Oops

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            oops("forward")
            result = super().forward(input)
            result.register_hook(lambda grad: oops("backward"))
            return result

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from make_batches(2)
        oops("data")

    kept, model = Kept(), Model(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.autograd.backward

    def run() -> None:
        with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
            for inputs, targets in monitor(batches()):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                oops("loop")

    with pytest.raises(Oops):
        run()
    assert torch.autograd.backward is plain
    assert kept.events[-1]["failed"]
    with Monitor(model, optimizer, to=[], progress=False):  # another one can begin
        pass


def test_a_step_that_fails_and_is_caught_does_not_disturb_the_next() -> None:
    """The pre hook of an optimizer whose step raises has no post hook."""
    kept, model = Kept(), make_model()

    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                raise ValueError
            return super().step()

    optimizer = SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for number, (inputs, _) in enumerate(monitor(make_batches(4))):
            model(inputs).sum().backward()
            if number == 1:
                with pytest.raises(ValueError):  # noqa: PT011
                    optimizer.step(lambda: 0.0)
            optimizer.step()
    assert [step["complete"] for step in kept.steps()] == [True, False, True, True]


def test_micro_batches_are_one_step() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for number, (inputs, _) in enumerate(monitor(make_batches(12, size=5)), 1):
            model(inputs).sum().backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert [(step["forwards"], step["samples"]) for step in kept.steps()] == [(3, 15)] * 4


def test_epochs_and_evaluations_are_no_steps() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = make_batches(3)
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for _ in range(2):
            train(model, optimizer, monitor(batches))
            with torch.no_grad():
                for inputs, _ in monitor(batches):
                    model(inputs)
            time.sleep(NAP_S)
    assert [step["step"] for step in kept.steps()] == list(range(1, 7))
    assert all(step["forwards"] == 1 for step in kept.steps())


def test_a_loop_that_is_left_ends_its_last_step() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loops_s = 0.0
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        next(iter(monitor(make_batches(1))))  # a look at a batch is no step
        for _ in range(2):
            begin = time.perf_counter()
            for number, (inputs, _) in enumerate(monitor(make_batches(9)), 1):
                model(inputs).sum().backward()
                optimizer.step()
                if number == 3:
                    break
            loops_s += time.perf_counter() - begin
            time.sleep(NAP_S)
    assert [step["step"] for step in kept.steps()] == list(range(1, 7))
    assert [step["forwards"] for step in kept.steps()] == [1] * 6
    assert sum(step["wall_s"] for step in kept.steps()) <= loops_s


class Endless(IterableDataset[Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(8))


def test_a_loader_without_a_length_is_followed() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for inputs in itertools.islice(monitor(DataLoader(Endless(), batch_size=4)), 3):
            model(inputs).sum().backward()
            optimizer.step()
    assert [step["samples"] for step in kept.steps()] == [4, 4, 4]


def test_an_iterator_draws_its_seed_where_the_loop_makes_it() -> None:
    kept, drawn = Kept(), []
    for is_watched in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
            loader = DataLoader(torch.arange(32.0).reshape(4, 8), shuffle=True)
            torch.manual_seed(0)
            begin = time.perf_counter()
            batches = iter(monitor(loader) if is_watched else loader)
            drawn.append(torch.rand(1))
            time.sleep(NAP_S)
            waited_s = time.perf_counter() - begin
            for inputs in batches:
                drawn.append(inputs)
                model(inputs).sum().backward()
                optimizer.step()
            loop_s = time.perf_counter() - begin - waited_s
    assert all(map(torch.equal, drawn[:5], drawn[5:]))
    assert sum(step["wall_s"] for step in kept.steps()[-4:]) <= loop_s


def test_an_iterator_that_outlives_its_monitor_does_not_disturb_the_next() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, progress=False) as monitor:
        old = iter(monitor(make_batches(3)))
        next(old)
    with pytest.raises(RuntimeError, match="outside of the block"):
        monitor([])
    with Monitor(model, optimizer, to=[kept], progress=False) as other:
        for number, (inputs, _) in enumerate(other(make_batches(3))):
            model(inputs).sum().backward()
            if number == 1:
                old.close()
            optimizer.step()
    assert [step["complete"] for step in kept.steps()] == [True] * 3


def test_a_loop_without_a_loader_ends_steps_with_the_optimizer() -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False):
        train(model, optimizer, make_batches(5))
    assert [step["step"] for step in kept.steps()] == [1, 2, 3, 4, 5]
    assert all(step["phases"]["backward"] > 0 for step in kept.steps())


def test_recomputation_of_checkpointed_regions_is_found() -> None:
    class Block(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            time.sleep(NAP_S)
            return super().forward(input).relu()

    block, kept = Block(8, 8), Kept()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with Monitor(None, optimizer, to=[kept], progress=False) as monitor:
        for inputs, _ in monitor(make_batches(3)):
            outer = drivetrain.checkpoint(lambda x: block(drivetrain.checkpoint(block, x)), inputs)
            outer.sum().backward()
            optimizer.step()
    for step in kept.steps():
        assert step["phases"]["recomputation"] >= 2 * NAP_S
        assert sum(step["phases"].values()) == pytest.approx(step["wall_s"], rel=1e-9)
        assert step["complete"]


def test_samples_are_counted_in_any_batch() -> None:
    kept, model = Kept(), make_model()
    batches = [{"meta": "a", "input": torch.zeros(5, 8)}, [torch.zeros(2, 8)], torch.zeros(3, 8), "no tensor"]
    with Monitor(model, to=[kept], progress=False) as monitor:
        for _ in monitor(batches):
            pass
    assert [step["samples"] for step in kept.steps()] == [5, 2, 3, 0]
    kept = Kept()
    with Monitor(model, to=[kept], progress=False, count=lambda batch: batch.numel()) as monitor:
        for _ in monitor([torch.zeros(3, 8)]):
            pass
    assert kept.steps()[0]["samples"] == 24


def test_samples_may_be_counted_by_a_tensor() -> None:
    kept = Kept()
    with Monitor(to=[kept], count=lambda batch: (batch > 0).sum(), progress=False) as monitor:
        for _ in monitor([torch.ones(3, 8)]):
            pass
    assert json.dumps(kept.steps()[0]["samples"]) == "24"


@pytest.mark.parametrize("result", [None, "many", torch.ones(2)])
def test_what_is_no_count_is_named(result: Any) -> None:
    with (
        Monitor(count=lambda batch: result, progress=False) as monitor,
        pytest.raises(TypeError, match=r"count returned .*, expected a number of samples"),
    ):
        next(iter(monitor([torch.ones(3)])))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"flops": "yes"}, ValueError, "flops is 'yes', expected 'auto', a number above 0, or None"),
        ({"flops": 0}, ValueError, "flops is 0, expected"),
        ({"peak_flops": -1.0}, ValueError, "peak_flops is -1.0, expected"),
        ({"flops": True}, ValueError, "flops is True, expected"),
        ({"peak_flops": "1e12"}, ValueError, "peak_flops is '1e12', expected"),
        ({"report_hang_after": -1}, ValueError, "report_hang_after is -1, expected seconds >= 0"),
        ({"report_hang_after": "8"}, ValueError, "report_hang_after is '8', expected seconds >= 0, 0: never, or None"),
        ({"count": 3}, TypeError, "count is 3, expected a function of a batch, or None"),
        ({"model": 3}, TypeError, "model is a int, expected a torch.nn.Module or None"),
        ({"optimizer": 3}, TypeError, "optimizer is 3, expected a torch.optim.Optimizer, a sequence of them, or None"),
        ({"optimizer": [None]}, TypeError, r"optimizer is \[None\], expected a torch.optim.Optimizer"),
        ({"to": "jsonl:a"}, TypeError, r"expected a list of strings: to=\['jsonl:a'\]"),
        ({"to": None}, TypeError, "to is None, expected a list of strings and sinks"),
        ({"to": Kept()}, TypeError, "expected a list of strings and sinks"),
        ({"to": [3]}, TypeError, "to has a int, expected strings"),
        ({"to": ["jsonl"]}, ValueError, "to has 'jsonl', expected one of jsonl:FILE"),
        ({"to": ["csv:a"]}, ValueError, "to has 'csv:a', expected one of jsonl:FILE"),
        ({"to": ["prometheus:port"]}, ValueError, "with a number as port"),
        ({"to": ["prometheus:70000"]}, ValueError, "port is 70000, expected 1 to 65535"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Monitor(**{"model": make_model(), **arguments})


def test_calls_outside_of_the_block_are_refused() -> None:
    monitor = Monitor(make_model())
    for call in (lambda: monitor([]), monitor.summary, lambda: monitor.advice, lambda: monitor.straggler):
        with pytest.raises(RuntimeError, match=r"outside of the block|has not been entered"):
            call()


def test_what_a_monitor_has_followed_is_freed_at_once() -> None:
    """Persistent workers of a loader that waits for garbage collection end 5 s late, and a model keeps its memory."""
    model, loader = make_model(), DataLoader(make_batches(4), batch_size=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freed = [weakref.ref(one) for one in (loader, model, optimizer)]
    gc.disable()
    with Monitor(model, optimizer, progress=False) as monitor:
        train(model, optimizer, monitor(loader))
    del model, loader, optimizer, monitor
    left = [one() for one in freed]
    gc.enable()
    assert left == [None] * 3


@pytest.mark.parametrize("kind", ["pickle", "copy"])
def test_a_model_is_saved_and_copied_inside_of_the_block(kind: str) -> None:
    model = nn.Linear(2, 2)
    with Monitor(model):
        other: Any = pickle.loads(pickle.dumps(model)) if kind == "pickle" else copy.deepcopy(model)
        x = torch.ones(1, 2)
        assert torch.equal(other(x), model(x))
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_models_and_attributes_of_loaders() -> None:
    loader = DataLoader(list(range(4)), batch_size=2)  # type: ignore[arg-type]
    with Monitor(torch.jit.script(nn.Linear(2, 2))) as monitor:
        marked: Any = monitor(loader)
        assert (marked.batch_size, marked.sampler) == (2, loader.sampler)
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = marked.no_such_name
