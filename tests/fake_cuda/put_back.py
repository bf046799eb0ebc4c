"""Puts known defects back into a copy of the tree, one at a time, and checks that the stand-in for CUDA shows each.

`make fake-cuda-defects` runs `python put_back.py PYTHON [NAME ...]`. Each defect is a replacement of source text. The
tests that must show it pass without the defect, and fail with the expected messages once it is put back. The script
prints a Markdown table. Its exit status is 1 if a defect is not shown.
"""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COPY = REPOSITORY / "build/fake_cuda_defects"
LIMIT_S = 3600  # limits one build with its tests; the first build compiles everything


@dataclass(frozen=True)
class Defect:
    """A replacement that puts a defect back, with the tests and messages that must show it."""

    name: str  # number in the list of defects, with a letter if one number has several
    what: str
    path: str
    old: str  # must occur exactly once in the file
    new: str
    tests: tuple[str, ...]
    messages: tuple[str, ...]  # regular expressions that must all match the output


LAUNCHES = "tests/fake_cuda/test_launches.py::test_a_row_launches_what_the_table_says"
DEFECTS = [
    Defect(
        "2",
        "ranks exchange checksums in a CPU tensor",
        "csrc/ddp/collectives.cpp",
        "const at::Tensor all = copied_to(mine, device);",
        "const at::Tensor all = mine;",
        ("tests/ddp/test_nccl_gpu.py::test_equals_torchs_class_under_a_pure_nccl_group[2-torch]",),
        (
            r"the all-reduce of the buckets' checksums failed in synchronized step \d+",
            "No backend type associated with device type cpu",
        ),
    ),
    Defect(
        "3",
        "Adagrad's counter stays on the CPU at construction",
        "python/drivetrain/optim/base.py",
        "            state_dicts.place_step_counters(engine)\n",
        "",
        ("tests/optim/test_optim_cuda.py::test_a_step_does_not_wait_for_the_device[adagrad]",),
        (r"its state 'step' is Float of 1 elements on cpu; expected one float32 on cuda:0",),
    ),
    Defect(
        "4",
        "the accumulator's stream does not wait for the stream that wrote the gradient",
        "csrc/grad/fuse_wgrad.cpp",
        "  if (differ && added) run_after(*there, *here);\n",
        "",
        ("tests/fake_cuda/test_side_stream.py::test_gradients_are_ordered",),
        (r"race: .*aten::mm.out.*: nothing orders the two",),
    ),
    Defect(
        "5",
        "a call of NCCL counts as finished once it returns success",
        "csrc/ddp/transport/nccl/nccl_communicator.cpp",
        "    while (result == ncclSuccess || result == ncclInProgress) {\n",
        "    if (result == ncclSuccess) return;\n    while (result == ncclSuccess || result == ncclInProgress) {\n",
        ("tests/ddp/test_nccl_gpu.py::test_equals_torchs_class_under_a_pure_nccl_group[2-nccl]",),
        (r"failed with NCCL error 4 .*Attempt to use communicator before the previous operation returned ncclSuccess",),
    ),
    Defect(
        "7a",
        "the host waits until the map of used parameters is on the device",
        "csrc/ddp/used_parameters.cpp",
        "global_ = copied_to(local_, params_[0].tensor.device());",
        "global_ = local_.to(params_[0].tensor.device());",
        ("tests/fake_cuda/test_host_waits.py::test_a_step_waits_no_more_than_torchs[all used-torch]",),
        (r"ours waited 1 times, torch's class 0",),
    ),
    Defect(
        "7b",
        "a weighted backward asks every zeroed gradient for its count",
        "csrc/ddp/weighted_mean.cpp",
        "if (counts.back().is_cpu() && counts.back().item<int64_t>() > 0) break;",
        "if (counts.back().item<int64_t>() > 0) break;",
        ("tests/fake_cuda/test_host_waits.py::test_a_step_waits_no_more_than_torchs[weighted-torch]",),
        (r"ours waited \d+ times, torch's class 0",),
    ),
    Defect(
        "7c",
        "a first step makes the remainders on the CPU",
        "python/drivetrain/optim/precision.py",
        "{name: conversions.new_extra(param, before, dtype)}",
        "{name: param.cpu().new_zeros(param.shape, dtype=dtype).to(param.device)}",
        (
            "tests/optim/test_optim_cuda.py::test_a_first_step_does_not_wait_for_the_device_either[adamw-master_24_state_8]",
        ),
        (r"called a synchronizing CUDA operation",),
    ),
    Defect(
        "8",
        "what writes to an offloaded tensor does not wait for its copy",
        "csrc/saved_tensors/offload.cpp",
        "  if (copied_out_) copied_out_->block(current_stream_of(options_.device()));\n",
        "",
        ("tests/saved_tensors/test_offload.py::test_what_comes_back",),
        (r"race: .*aten::zero_ .*cudaMemcpyAsync .*: nothing orders the two",),
    ),
    Defect(
        "13a",
        "a test gives CUDA parameters gradients that are on the CPU",
        "tests/precision_cases.py",
        "other.grad = grad.to(other.device, other.dtype)",
        "other.grad = grad.to(other.dtype)",
        ("tests/optim/test_precision.py::test_cuda_gives_the_cpus_bits[dtype0-adamw-state_8-mixed]",),
        (r"assigned grad has data of a different type|attempting to assign a gradient",),
    ),
    Defect(
        "13b",
        "the warning of `set_sync_debug_mode` is an error, and leaves the mode on for later tests",
        "tests/waits.py",
        """    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waiting() -> Iterator[None]:
    \"""Makes operations in the block raise if they wait for the device.\"""
    torch.cuda.synchronize()
    try:
        _set_sync_debug_mode("error")
        yield
""",
        """    torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    _set_sync_debug_mode("error")
    try:
        yield
""",
        (
            "tests/optim/test_optim_cuda.py::test_a_step_does_not_wait_for_the_device[adamw]",
            "tests/optim/test_optim_cuda.py::test_a_step_does_not_wait_for_the_device[adamw_amsgrad]",
        ),
        ("Synchronization debug mode is a prototype feature", "called a synchronizing CUDA operation"),
    ),
    Defect(
        "14a",
        "a step with 24-bit masters has no kernel for its parameters with float32 states",
        "csrc/optim/step_plan.h",
        "  X(Adam, kBFloat16Remainder8, kBFloat16, kFloat32)   \\\n",
        "",
        (f"{LAUNCHES}[AdamW bf16, 8-bit remainder, 8-bit states, GPT-2]",),
        (r"AdamW bf16, 8-bit remainder, 8-bit states, GPT-2 .*loop_cuda<Adam, float>",),
    ),
    Defect(
        "14b",
        "the usual mixed precision has no kernel",
        "csrc/optim/step_plan.h",
        "  X(Adam, kBFloat16Remainder16, kBFloat16, kFloat32)  \\\n",
        "",
        (f"{LAUNCHES}[AdamW bf16, 16-bit remainder, fp32 states, GPT-2]",),
        (r"AdamW bf16, 16-bit remainder, fp32 states, GPT-2 .*loop_cuda<Adam, float>",),
    ),
    Defect(
        "14c",
        "every replay of a captured step writes its table again",
        "csrc/base/device_table.cpp",
        "    ended_tables().free();\n    KeptForGraph",
        "    on_device_ = table_of_launch(bytes, device, stream);\n"
        "    return static_cast<char*>(on_device_.data_ptr());\n"
        "    KeptForGraph",
        (f"{LAUNCHES}[AdamW fp32, GPT-2]",),
        (r"AdamW fp32, GPT-2 \| `start_step`, `step_kernel<Adam, Float32, Float32, Float32>` \| 0 \| (?!2 )\d+ \|",),
    ),
    Defect(
        "14d",
        "LAMB's norms take a pass over the parameters twice",
        "csrc/optim/run_cuda.cpp",
        "    adapt_cuda(job, batch.num_chunks, static_cast<TrustRatioSums*>(sums.data_ptr()), of_params, stream);\n",
        2
        * "    adapt_cuda(job, batch.num_chunks, static_cast<TrustRatioSums*>(sums.data_ptr()), of_params, stream);\n",
        (f"{LAUNCHES}[LAMB fp32, GPT-2]",),
        (r"LAMB fp32, GPT-2 .*2 x `trust_ratio_sums<Lamb, float>`",),
    ),
]


def copy_tree() -> None:
    """Copies the current tree. Unchanged files keep their modification times, so that the build is incremental."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    wanted = {Path(name) for name in listed if name and (REPOSITORY / name).is_file()}
    for name in wanted:
        write(COPY / name, (REPOSITORY / name).read_bytes())
        (COPY / name).chmod((REPOSITORY / name).stat().st_mode)
    for top in {name.parts[0] for name in wanted}:
        for path in [COPY / top] if (COPY / top).is_file() else (COPY / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.relative_to(COPY) not in wanted:
                path.unlink()


def write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def put_back(defect: Defect) -> str:
    """Returns the file's text with the defect. Raises ValueError unless the replaced text occurs exactly once."""
    text = (REPOSITORY / defect.path).read_text()
    if text.count(defect.old) != 1:
        raise ValueError(
            f"defect {defect.name}: {defect.path} has {text.count(defect.old)} places to put it back, not 1"
        )
    return text.replace(defect.old, defect.new)


def run(python: str, tests: tuple[str, ...]) -> tuple[int, str]:
    """Builds the copy and runs tests there on the stand-in. Returns pytest's exit status and output."""
    command = [str(COPY / "tests/fake_cuda/run.sh"), python, "-m", "gpu or fake_cuda", "--no-showlocals", *tests]
    done = subprocess.run(
        command,
        cwd=COPY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


def shown(defect: Defect, status: int, output: str) -> str:
    """Returns the messages that show the defect, or an empty string if the tests did not show it."""
    found = [re.search(message, output) for message in defect.messages]
    return "; ".join(f"`{each.group(0)}`" for each in found if each) if status == 1 and all(found) else ""


def main(python: str, *names: str) -> int:
    own = REPOSITORY / ".venv-fake-cuda/bin/python"  # run.sh makes it if the given Python has no CUDA build of torch
    python = str(own) if own.exists() else python
    chosen = [defect for defect in DEFECTS if not names or defect.name in names]
    if not set(names) <= {defect.name for defect in chosen}:
        print(f"the defects are {', '.join(defect.name for defect in DEFECTS)}; got {' '.join(names)}", file=sys.stderr)
        return 2
    copy_tree()
    tests = tuple(dict.fromkeys(test for defect in chosen for test in defect.tests))
    begin = time.monotonic()
    status, output = run(python, tests)
    print(f"without a defect: status {status}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if status != 0:
        print(output, file=sys.stderr)
        return 1
    rows, escaped = [], []
    for defect in chosen:
        begin = time.monotonic()
        write(COPY / defect.path, put_back(defect).encode())
        try:
            status, output = run(python, defect.tests)
        finally:
            write(COPY / defect.path, (REPOSITORY / defect.path).read_bytes())
        said = shown(defect, status, output)
        print(f"{defect.name}: status {status}, {time.monotonic() - begin:.0f} s: {said}", file=sys.stderr)
        if not said:
            escaped.append(defect.name)
            print(output, file=sys.stderr)
        ids = ", ".join(f"`{test.removeprefix('tests/')}`" for test in defect.tests)
        rows.append(f"| {defect.name} | {defect.what} | {ids} | {said or 'NOT SHOWN'} |")
    print("| Defect | What was put back | Test | Message |", "| --- | --- | --- | --- |", *rows, sep="\n")
    print(f"{len(chosen) - len(escaped)} of {len(chosen)} defects are shown.", file=sys.stderr)
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
