"""The limits on the machine code of CUDA kernels: the built module keeps them, and a kernel that does not is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_gates as gates
import machine_code
import sum_kernel_gates

# A step of SGD in float32 as nvcc compiles it, cut down to what the gates look at: a lane has 4 elements.
NAME = "_ZN10drivetrain5optim11step_kernelINS0_3SgdELNS_7formats6FormatE0ELS4_0ELS4_0EEEvNS0_13StepKernelJobE"
USAGE = f" Function {NAME}:\n  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:596 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
CODE = f"""
                Function : {NAME}
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA 0xa0 ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R4.64] ;
        /*0040*/                   LDG.E.128 R12, desc[UR4][R6.64] ;
        /*0050*/                   FMUL R12, R12, R20 ;
        /*0060*/                   FADD R8, R8, -R12 ;
        /*0070*/                   STG.E.128 desc[UR4][R4.64], R8 ;
        /*0080*/                   EXIT ;
        /*00a0*/                   LDG.E R8, desc[UR4][R4.64] ;
        /*00b0*/                   LDG.E R12, desc[UR4][R6.64] ;
        /*00c0*/                   FADD R8, R8, -R12 ;
        /*00d0*/                   STG.E desc[UR4][R4.64], R8 ;
        /*00e0*/               @P1 BRA 0xa0 ;
        /*00f0*/                   EXIT ;
        /*0100*/                   BRA 0x100;
"""


def measured(usage: str = USAGE, code: str = CODE) -> gates.Measured:
    (kernel,) = gates.kernels_in(machine_code.codes_in(usage, code))
    return gates.measure(kernel)


def test_a_kernel_within_all_limits_passes(capsys: pytest.CaptureFixture[str]) -> None:
    good = measured()
    assert good.findings == []
    assert (good.bytes_under_way, good.threads, good.per_element) == (32, 1536, 9 / 4)
    assert gates.report([good]) == 0
    assert "1 kernels for sm_90 keep all limits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gate", "before", "after", "value"),
    [
        ("registers", "REG:40", "REG:49", "49"),
        ("local memory", "STACK:0", "STACK:8", "8 bytes, 0 accesses"),
        ("local memory", "FMUL R12, R12, R20", "LDL R12, [R1]", "0 bytes, 1 accesses"),
        ("block barriers", "FMUL R12, R12, R20", "BAR.SYNC.DEFER_BLOCKING 0x0", "1"),
        ("loads of bytes of arguments", "LDC R1, c[0x0][0x28]", "LDC.U8 R1, c[0x0][0x28]", "LDC.U8"),
        ("instructions per element", "/*0060*/", 250 * "/*0060*/ FADD R8, R8, R9 ;\n" + "/*0060*/", "64.75"),
        (
            "loads before those of arrays",
            "/*0010*/",
            2 * "/*0010*/ LDG.E.64 R4, desc[UR4][R2.64] ;\n" + "/*0010*/",
            "3",
        ),
        ("widths of loads before the first use", "LDG.E.128 R8", "LDG.E.64 R8", "1 of 8 bytes, 1 of 16 bytes"),
        ("widths of stores", "STG.E.128 desc[UR4][R4.64], R8", "STG.E.64 desc[UR4][R4.64], R8", ""),
    ],
)
def test_what_breaks_a_limit_is_named(
    gate: str, before: str, after: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert before in USAGE + CODE
    bad = measured(USAGE.replace(before, after), CODE.replace(before, after))
    assert gate in [finding.gate for finding in bad.findings]
    assert gates.report([bad]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"FAILED Sgd A \(fp32, fp32, no states\): {gate}: {re.escape(value)}.*, limit: ", printed)


def test_a_load_after_the_first_use_counts_as_too_few_bytes_under_way() -> None:
    second = "        /*0040*/                   LDG.E.128 R12, desc[UR4][R6.64] ;\n"
    used = "        /*0038*/                   FADD R8, R8, R9 ;\n"
    bad = measured(code=CODE.replace(second, used + second))
    assert bad.bytes_under_way == 16
    assert [finding.gate for finding in bad.findings] == [
        "widths of loads before the first use",
        "bytes in progress on a multiprocessor",
    ]
    assert bad.findings[1].value == str(16 * 1536)
    assert bad.findings[1].limit == f"at least {40 << 10}"


def test_formats_without_limits_are_an_error() -> None:
    with pytest.raises(machine_code.GateError, match="add it there"):
        gates.kernel_of(NAME.replace("FormatE0", "FormatE3"))


def test_a_file_without_kernels_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.o").write_bytes(b"")
    with pytest.raises(machine_code.GateError):
        gates.check(machine_code.codes_of_file(tmp_path / "empty.o", gates.NAMES), tmp_path / "empty.o")


@pytest.mark.parametrize(
    ("before", "after", "violation"),
    [
        ("REG:40", "REG:49", "registers: 49, limit: 48"),
        ("STACK:0", "STACK:8", "local memory: 8 bytes, limit: 0"),
        ("FMUL R12, R12, R20", "BAR.SYNC.DEFER_BLOCKING 0x0", "block barriers: 1, limit: 0"),
        ("LDG.E.128 R8", "LDG.E.64 R8", "bytes in progress per lane: 24, limit: at least 32"),
    ],
)
def test_limits_of_other_kernels(
    before: str, after: str, violation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = sum_kernel_gates.Limits("11step_kernel", most_registers=48, least_bytes=32)
    monkeypatch.setattr(sum_kernel_gates, "LIMITS", (limits,))
    assert sum_kernel_gates.report(sum_kernel_gates.check(machine_code.codes_in(USAGE, CODE))) == 0
    bad = machine_code.codes_in(USAGE.replace(before, after), CODE.replace(before, after))
    assert sum_kernel_gates.report(sum_kernel_gates.check(bad)) == 1
    assert violation in capsys.readouterr().out
    assert sum_kernel_gates.report(sum_kernel_gates.check([])) == 1


def test_the_built_kernels_keep_all_limits(repository: Path) -> None:
    from drivetrain import _build_info

    if _build_info.CUDA == "none":
        pytest.skip('drivetrain was built without CUDA kernels: "make test" builds them where nvcc is found')
    if "90" not in _build_info.CUDA.partition(" for ")[2]:
        pytest.skip(f"drivetrain was built for other architectures than sm_90: {_build_info.CUDA}")
    try:
        machine_code.tool("cuobjdump"), machine_code.tool("nvdisasm")
    except machine_code.GateError as error:
        pytest.skip(str(error))
    command = [sys.executable, "tests/kernel_gates.py"]  # which does not import torch
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=machine_code.TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(re.findall(r"^Adam (\w) ", run.stdout, re.MULTILINE)) == set(gates.MOST_REGISTERS), run.stdout
