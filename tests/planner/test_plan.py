"""Tests times, formats, prices, questions and comparisons of plans."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import drivetrain
from drivetrain.planner import calibrate as calibration
from drivetrain.planner.compare import compare, table
from drivetrain.planner.cost import Run, price_run, with_interruptions
from drivetrain.planner.devices import device_names
from drivetrain.planner.questions import largest
from drivetrain.planner.result import Plan
from drivetrain.planner.timing import all_reduce_seconds
from suite.activation_models import GPT

GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    with torch.device("meta"):
        model = GPT(depth=2, dim=128, heads=2, length=64, dropout=0.0, vocabulary=512).bfloat16()

    def step(batch: int = 4, length: int = 64) -> None:
        tokens, targets = torch.randint(512, (2, batch, length))
        model(tokens, targets).backward()

    return drivetrain.plan(model, step, device="h100", batch=4, length=64, optimizer="AdamW")


# ---- Memory under options.


def test_gradients_lie_in_one_flat_buffer_of_ours_and_in_two_of_torchs(plan: Plan) -> None:
    size = plan.trace.parameter_bytes
    ours = plan.but(world_size=2, budget=None).memory.at_peak["gradients"]
    torchs = plan.but(world_size=2, ddp="torch").memory
    assert size <= ours <= size * 1.3  # and one gradient that backward has just made
    assert torchs.peak_allocated >= plan.memory.peak_allocated + size * 0.9


def test_formats_change_states_by_their_bytes(plan: Plan) -> None:
    trained = plan.trace.num_parameters
    assert plan.trace.bytes_of("optimizer states") == 4 * trained
    eight = plan.but(state_bits=8).trace.bytes_of("optimizer states")
    assert 2 * trained < eight < 2.2 * trained
    with_masters = plan.but(state_bits=8, master_bits=24).trace.bytes_of("optimizer states")
    assert with_masters == eight + trained


def test_sharding_divides_states_and_gradients(plan: Plan) -> None:
    whole = plan.but(world_size=8).memory.at_peak
    optimizer = plan.but(world_size=8, shard="optimizer").memory.at_peak
    gradients = plan.but(world_size=8, shard="gradients", bucket_mib=0.01).memory.at_peak
    assert optimizer["optimizer states"] == pytest.approx(whole["optimizer states"] / 8, rel=0.01)
    assert gradients["gradients"] < whole["gradients"] / 2


def test_release_and_accumulation(plan: Plan) -> None:
    assert plan.but(release=True, bucket_mib=0.01).memory.at_peak.get("gradients", 0) < plan.trace.parameter_bytes / 2
    assert plan.but(accumulate=4).memory.at_peak["gradients"] >= plan.trace.parameter_bytes
    assert plan.but(accumulate=4).time.samples == 4 * plan.time.samples
    with pytest.raises(ValueError, match="accumulate must be 1"):
        plan.but(release=True, accumulate=2)


def test_budget_lowers_the_peak_and_costs_time(plan: Plan) -> None:
    large = plan.sized(batch=64)
    tight = large.but(budget=large.memory.at_peak["activations"] // 2)
    assert tight.recomputation is not None
    assert tight.recomputation.peak_bytes <= large.memory.at_peak["activations"] // 2
    assert tight.memory.peak_allocated < large.memory.peak_allocated
    assert tight.time.backward_s > large.time.backward_s
    assert "budget:" in str(tight)
    with pytest.raises(ValueError, match="smallest that the step can keep"):
        large.but(budget=1000)


def test_reserved_holds_allocated_and_timeline_covers_the_step(plan: Plan) -> None:
    memory = plan.memory
    assert memory.peak_reserved >= memory.peak_allocated
    assert memory.total == memory.peak_reserved + memory.fixed_bytes
    assert sum(memory.at_peak.values()) == pytest.approx(memory.peak_allocated, rel=0.02)  # of rounding
    assert max(moment.allocated for moment in memory.timeline) == memory.peak_allocated
    assert {plan.trace.ops[moment.op].phase for moment in memory.timeline} == {"forward", "backward", "optimizer"}


# ---- Time.


def test_communication_is_that_of_the_network_model(plan: Plan) -> None:
    link, network = plan.device.link, plan.device.network
    whole = plan.trace.parameter_bytes
    for ranks in (1, 8, 16):
        time = plan.but(world_size=ranks, bucket_mib=1000.0).time
        assert time.communication_s == pytest.approx(all_reduce_seconds(whole, ranks, 8, link, network))


def test_small_buckets_overlap_more(plan: Plan) -> None:
    large = plan.but(world_size=16, bucket_mib=1000.0).time
    small = plan.but(world_size=16, bucket_mib=0.2).time
    assert large.exposed_s == pytest.approx(large.communication_s)
    assert small.exposed_s < small.communication_s


def test_flops_are_those_of_the_formula() -> None:
    model = nn.Linear(64, 32, bias=False)
    plan = drivetrain.plan(model, lambda: model(torch.ones(16, 64)).sum().backward(), device="a100")
    assert plan.time.flops == 2 * (2 * 16 * 64 * 32)  # forward, and the gradient of the weights


def test_calibration_measures_every_operation_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    planned = drivetrain.plan(model, lambda: model(torch.ones(8, 32)).sum().backward(), device="cpu")
    timed = planned.calibrated(600.0)
    assert timed.calibration is not None
    assert timed.device.launch_s == timed.calibration.figures["launch_s"]
    cache = calibration.cache_path()
    assert cache.is_relative_to(tmp_path)
    before = cache.read_text()
    again = planned.calibrated(0.0)  # no time to measure: everything comes from the cache
    assert again.calibration is not None
    assert again.calibration.seconds == timed.calibration.seconds
    assert cache.read_text() == before
    refined = timed.refine(2 * timed.time.step_s)
    assert refined.time.step_s == pytest.approx(2 * timed.time.step_s)
    assert planned.calibrated(0.0).time.step_s == pytest.approx(refined.time.step_s)
    with pytest.raises(ValueError, match="leave it out"):
        drivetrain.plan(model, lambda: None, device="h100", calibrate=True)


def test_a_slow_figure_leaves_time_for_the_operations() -> None:
    """Some processors take two seconds for a product in bfloat16."""
    now = [0.0]

    def call() -> None:
        now[0] += 2.0

    assert calibration._median(call, clock=lambda: now[0]) == 2.0
    assert now[0] == 2.0


def test_recurrent_layers_of_onednn_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward pass would crash on a made-up workspace."""
    monkeypatch.setattr(calibration, "_figures", dict)
    model = nn.LSTM(8, 8)
    planned = drivetrain.plan(model, lambda: model(torch.ones(7, 4, 8))[0].sum().backward(), device="cpu")
    timed = planned.calibrated(600.0, tmp_path / "cache.json")
    backward = next(op for op in timed.trace.last_step() if op.name == "aten::mkldnn_rnn_layer_backward")
    assert timed.calibration is not None
    assert backward.signature not in timed.calibration.seconds
    assert timed.time.backward_s > 0


def test_a_correction_is_of_one_way_to_train_a_model() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def key(batch: int = 8, autocast: bool = False, checkpointed: bool = False) -> str:
        def step() -> None:
            x = torch.ones(batch, 32)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            out.sum().backward()

        return calibration.fingerprint(drivetrain.plan(model, step, device="cpu").trace)

    assert key() == key(batch=16)
    assert len({key(), key(autocast=True), key(checkpointed=True)}) == 3


# ---- Questions.


@given(
    per_sample=st.integers(1, 1000),
    fixed=st.integers(0, 100_000),
    step=st.sampled_from([1, 512, 20_000]),
    capacity=st.integers(1, 10_000_000),
    start=st.integers(1, 2000),
    limit=st.integers(1, 100_000),
)
def test_largest_finds_the_bound_in_few_tries(
    per_sample: int, fixed: int, step: int, capacity: int, start: int, limit: int
) -> None:
    tried = []

    def needs(size: int) -> int:
        return -(-(fixed + per_sample * size) // step) * step

    def counted(size: int) -> int:
        tried.append(size)
        return needs(size)

    found = largest(counted, capacity, start, limit)
    assert found == bisect_right(range(1, limit + 1), capacity, key=needs)
    assert all(1 <= size <= limit for size in tried)
    assert len(tried) <= 4 * limit.bit_length() + 4  # doubling and halving alone take half of that
    if step == 1:
        assert len(tried) <= 8  # a line


def test_largest_batch_and_length_fit_and_one_more_does_not(tmp_path: Path) -> None:
    small = (
        (Path(drivetrain.__file__).parent / "planner" / "devices.toml")
        .read_text()
        .split("[h100]")[1]
        .split("[h200]")[0]
    )
    table = tmp_path / "devices.toml"
    table.write_text("[tiny]" + small.replace("memory = 79.1", "memory = 0.78"))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def step(batch: int, length: int = 8) -> None:
        model(torch.empty(batch, length, 64, device="meta")).sum().backward()

    plan = drivetrain.plan(model, step, device="tiny", devices=table, batch=8)
    batch = plan.largest_batch()
    assert batch > 8
    assert plan.sized(batch=batch).memory.fits
    assert not plan.sized(batch=batch + 1).memory.fits
    length = plan.largest_length(multiple=8)
    assert length % 8 == 0
    assert plan.sized(length=length).memory.fits
    assert not plan.sized(length=length + 8).memory.fits


def test_gains_name_options_with_their_prices() -> None:
    with torch.device("meta"):
        model = GPT(depth=2, dim=512, heads=8, length=64, dropout=0.0, vocabulary=512).bfloat16()
        tokens, targets = torch.randint(512, (2, 8, 64))
    plan = drivetrain.plan(model, lambda: model(tokens, targets).backward(), world_size=8, optimizer="AdamW")
    gains = {gain.option: gain for gain in plan.what_helps()}
    assert gains['shard="optimizer"'].saved_bytes > 0
    assert gains["state_bits=8"].saved_bytes > 0
    assert gains["master_bits=24"].saved_bytes < 0  # the bits must lie somewhere
    assert {"release=True", 'shard="gradients"', "expandable=True", "budget=50% of activations"} <= gains.keys()
    assert gains["budget=50% of activations"].added_s > 0
    saved = [gain.saved_bytes for gain in plan.what_helps()]
    assert saved == sorted(saved, reverse=True)


def test_smallest_device_and_count(plan: Plan) -> None:
    fits = plan.smallest_device()
    assert [fit.device for fit in fits] == ["l4", "rtx4090", "h100", "a100", "h200"]
    assert plan.smallest_count() == 1
    assert set(device_names()) >= {fit.device for fit in fits}


# ---- Cost.

PRICES = {
    "currency": "EUR",
    "storage": {"gib_month": 0.02},
    "spot": {"interruptions_per_hour": 0.5, "restart_minutes": 6},
    "devices": {"h100": {"on_demand": 3.0, "spot": 1.0, "reserved": 2.0}},
}


def test_price_of_a_run() -> None:
    prices = {p.tariff: p for p in price_run(PRICES, "h100", 8, 1.0, 10 * GIB, Run(36_000, checkpoints_kept=2))}
    assert prices["on_demand"].hours == 10
    assert prices["on_demand"].amount == pytest.approx(3.0 * 80)
    assert prices["on_demand"].storage == pytest.approx(0.02 * 20 * 10 / 730)
    assert prices["on_demand"].currency == "EUR"
    assert prices["spot"].hours > 10
    assert prices["spot"].amount < prices["reserved"].amount < prices["on_demand"].amount


def test_interruptions_agree_with_a_simulation() -> None:
    rng = random.Random(0)
    rate, interval, restart, train = 2.0 / 3600, 600.0, 300.0, 36_000.0
    total = 0.0
    runs = 400
    for _ in range(runs):
        done = 0.0
        while done < train:
            until = rng.expovariate(rate)
            if until < interval:
                total += until + restart
            else:
                total += interval
                done += interval
    assert with_interruptions(train, 2.0, interval, restart) == pytest.approx(total / runs, rel=0.03)
    assert with_interruptions(train, 0.0, interval, restart) == train
    assert math.isfinite(with_interruptions(train, 100.0, interval, restart))


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({}, r"no \[devices.h100\]; it has: none"),
        ({"devices": {"a100": {"spot": 1}}}, r"no \[devices.h100\]; it has: a100"),
        ({"devices": 3}, r"devices is 3, expected a table: \[devices\]"),
        (
            {"devices": {"h100": {"spot": 1, "ondemand": 2}}},
            "devices.h100 has an entry 'ondemand', expected one of: on_",
        ),
        ({"devices": {"h100": {"spot": 1}}, "spot": {"restart_minute": 3}}, "spot has an entry 'restart_minute'"),
        ({"devices": {"h100": {"spot": 1}}, "prices": {}}, "prices has an entry 'prices'"),
        ({"devices": {"h100": {"spot": -1}}}, "devices.h100.spot is -1, expected a number of 0 or more"),
        ({"devices": {"h100": {}}}, "none of on_demand"),
        ({"devices": {"h100": {"spot": "cheap"}}}, "devices.h100.spot is 'cheap'"),
        ({"devices": {"h100": {"spot": 1}}, "spot": {"interruptions_per_hour": 1e6}}, "makes no progress"),
    ],
)
def test_wrong_prices_are_named(prices: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        price_run(prices, "h100", 1, 1.0, 0, Run(10_000))


# ---- Comparison, pictures, and bad input.


def test_compare_reads_the_monitors_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(4, 8)] * 6

    def step() -> None:
        model(batches[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    record = tmp_path / "run.jsonl"
    with drivetrain.Monitor(model, optimizer, to=[f"jsonl:{record}"], progress=False) as monitor:
        for _ in monitor(batches):
            step()
    plan = drivetrain.plan(model, step, device="cpu", batch=4)
    found = {each.what: each for each in compare(plan, record)}
    assert found["step"].measured > 0
    assert found["step"].predicted == pytest.approx(1e3 * plan.time.step_s)
    assert {"forward", "backward", "samples per second and rank"} <= found.keys()
    assert "error" in table(list(found.values()))
    events = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps(event) + "\n" for event in events if event["type"] != "step"))
    with pytest.raises(ValueError, match="no step to compare"):
        compare(plan, record)


def test_picture(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plan.svg", "plan.png"):
        plan.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert plan.plot()._repr_png_().startswith(b"\x89PNG")
    assert "<table>" in plan._repr_html_()
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        plan.plot(tmp_path / "plan.pdf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plan.plot(tmp_path / "plan.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"shard": "all"}, "shard is 'all'"),
        ({"ddp": "horovod"}, "ddp is 'horovod'"),
        ({"optimizer": "Adamw"}, "optimizer is 'Adamw'"),
        ({"budget": "lots"}, "budget is 'lots'"),
        ({"state_bits": 8}, "need an optimizer"),
        ({"bucket_mib": 0.0}, "bucket_mib is 0.0"),
        ({"bucket_mib": "25"}, "bucket_mib is '25'"),
        ({"batch": 0}, "batch is 0, expected a whole number"),
        ({"length": "8"}, "length is '8', expected a whole number"),
        ({"master_bits": 16, "optimizer": "AdamW"}, "master_bits is 16, expected one of None, 32, 24"),
        ({"budget": -1}, "budget is -1, expected a number of bytes"),
        ({"device": None}, "device is None, expected one of"),
        ({"device": "cpu", "calibrate": -3}, "calibrate is -3, expected True, False or a number"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        drivetrain.plan(model, lambda: model(torch.ones(2, 4)).sum().backward(), **arguments)  # type: ignore[arg-type]


def test_arguments_of_a_wrong_type_are_named() -> None:
    model = nn.Linear(4, 4)
    plan: Any = drivetrain.plan
    for arguments, options, message in (
        ((None, lambda: None), {}, "model is a NoneType, expected a torch.nn.Module"),
        ((model, None), {}, "step_fn is None, expected a function"),
        ((model, lambda: None), {"optimizer": torch.optim.AdamW}, "optimizer is .*, expected the name of a class"),
    ):
        with pytest.raises(TypeError, match=message):
            plan(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0, expected a whole number of 1"),
        ({"num_steps": 2.5}, "num_steps is 2.5, expected a whole number"),
        ({"num_steps": 1, "checkpoints_kept": -1}, "checkpoints_kept is -1, expected a whole number of 0"),
    ],
)
def test_wrong_facts_of_a_run_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(**arguments)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS, drivetrain.optim.SGD])
def test_a_closure_runs_forward_and_backward(optimizer: Any) -> None:
    model = nn.Linear(4, 4)
    few = {"max_iter": 3, "history_size": 2} if optimizer is torch.optim.LBFGS else {}
    stepping = optimizer(model.parameters(), lr=0.1, **few)

    def closure() -> torch.Tensor:
        stepping.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    def plain() -> None:
        closure()
        stepping.step()

    def phases(step: Any) -> list[str]:
        return [op.phase for op in drivetrain.plan(model, step, device="cpu").trace.last_step()]

    if optimizer is torch.optim.LBFGS:  # it has no other form, and calls the closure many times
        assert {"forward", "backward", "optimizer"} <= set(phases(lambda: stepping.step(closure)))
    else:
        assert Counter(phases(lambda: stepping.step(closure))) == Counter(phases(plain))


def test_a_size_that_the_step_does_not_take_has_no_largest() -> None:
    model = nn.Linear(4, 4)
    plan = drivetrain.plan(model, lambda: model(torch.ones(2, 4)).sum().backward(), batch=2)
    with pytest.raises(ValueError, match="step_fn takes no batch"):
        plan.largest_batch()
    with pytest.raises(ValueError, match="step_fn takes no length"):
        plan.largest_length()
