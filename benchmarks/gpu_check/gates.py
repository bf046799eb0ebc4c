"""Defines the figures that kernels and wrappers must reach on an H100, for some rows of the benchmarks."""

from dataclasses import dataclass
from typing import Any

from .jobs import Details

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
GPT2 = ", GPT-2 124M, against fused"
SHARE = "share of a copy's bandwidth"


@dataclass(frozen=True)
class Gate:
    """A required figure.

    Attributes:
        job: Name of the benchmark.
        what: The text of the report.
        row: Start of the text of the measured row.
        required: The bound, in `unit`.
        unit: Unit of the figure; empty for a ratio.
        detail: Start of the text of an indented row below `row` that is measured instead.
        column: Key of the figure in the row.
        is_least: True for a lower bound.
    """

    job: str
    what: str
    row: str
    required: float
    unit: str = ""
    detail: str = ""
    column: str = "ratio"
    is_least: bool = False

    def verdict(self, tables: dict[str, list[dict[str, Any]]]) -> Details:
        measured = self._measured(tables)
        if measured is None:
            word = NOT_MEASURED
        else:
            word = MET if (measured >= self.required if self.is_least else measured <= self.required) else MISSED
        sign = ">=" if self.is_least else "<="
        required = f"{sign} {self.required:g}{' ' if self.unit else ''}{self.unit}"
        return {"what": self.what, "required": required, "measured": measured, "unit": self.unit, "verdict": word}

    def _measured(self, tables: dict[str, list[dict[str, Any]]]) -> float | None:
        for rows in tables.values():
            is_inside = False
            for row in rows:
                if not row["what"].startswith(" "):
                    is_inside = row["what"].startswith(self.row)
                if is_inside and row["what"].strip().startswith(self.detail or self.row):
                    value: float | None = row.get(self.column)
                    return value
        return None


def _share(what: str, row: str, required: float) -> Gate:
    return Gate("optim", what, row, required, "%", SHARE, "ours", is_least=True)


GATES = (
    _share("AdamW A, fp32: share of a copy", f"AdamW fp32{GPT2}", 95),
    _share("AdamW B, bf16 with fp32 states: share of a copy", f"AdamW bf16, fp32 states{GPT2}", 95),
    _share("AdamW C, all bf16: share of a copy", f"AdamW bf16, torch's too{GPT2}", 95),
    _share(
        "AdamW D, 16-bit remainder and states: share of a copy",
        f"AdamW bf16, 16-bit remainder, 16-bit states{GPT2}",
        95,
    ),
    _share(
        "AdamW E, 16-bit remainder, 8-bit states: share of a copy",
        f"AdamW bf16, 16-bit remainder, 8-bit states{GPT2}",
        92,
    ),
    _share(
        "AdamW F, 8-bit remainder and states: share of a copy", f"AdamW bf16, 8-bit remainder, 8-bit states{GPT2}", 85
    ),
    _share("AdamW H, fp32 with 8-bit states: share of a copy", f"AdamW fp32, 8-bit states{GPT2}", 95),
    Gate("optim", "AdamW A against torch's fused fp32", f"AdamW fp32{GPT2}", 0.90),
    Gate("optim", "AdamW E against torch's fused fp32", f"AdamW bf16, 16-bit remainder, 8-bit states{GPT2}", 0.48),
    *(
        _share(f"{rule} fp32: share of a copy", f"{rule}{with_what} fp32", 90)
        for rule, with_what in (
            *(("LAMB", ""), ("Adafactor", ""), ("SGD", " with momentum"), ("Lion", "")),
            *(("Adagrad", ""), ("RMSprop", "")),
        )
    ),
    Gate("rivals", "1.3 B parameters, 24-bit masters, 8-bit states, against FlashAdamW", "1.3 B", 0.6),
    Gate(
        "tail",
        "unscale, clip, AdamW, zero in fp32 against torch's four calls",
        "unscale, clip, AdamW, zero fp32, GPT-2",
        0.65,
    ),
    Gate("tail", "the same in E", "unscale, clip, AdamW, zero bf16", 0.33),
    Gate("host", "10,000 x 64: device time of a step", "AdamW fp32, 10,000 x 64: device", 8, "us", column="ours"),
    Gate("host", "148 tensors: host time of a step", "AdamW fp32, 148 tensors: host", 0.15, "ms", column="ours"),
    Gate("host", "10,000 x 64: host time of a step", "AdamW fp32, 10,000 x 64: host", 1, "ms", column="ours"),
    Gate(
        "host",
        "DDP on one rank, host-bound model, against none (17.5 of 15.8 ms)",
        "a tiny GPT of 148 tensors, one rank: our",
        1.108,
    ),
    Gate("compiled", "activation budget on compiled blocks against torch's memory budget", "compiled blocks", 1.0),
)


def verdicts(job: str, tables: dict[str, list[dict[str, Any]]]) -> list[Details]:
    """Returns one verdict for each gate of that job, in order."""
    return [gate.verdict(tables) for gate in GATES if gate.job == job]


def judged(job: str, details: Details, is_dry: bool) -> Details:
    """Adds the verdicts to a job's details. A missed gate sets the status "missed", except in a dry run."""
    found = verdicts(job, details.get("tables", {}))
    if not found or is_dry:
        return details
    missed = [each["what"] for each in found if each["verdict"] == MISSED]
    note = f"{sum(each['verdict'] == MET for each in found)} of {len(found)} gates met"
    judged = {**details, "gates": found, "note": "; ".join(filter(None, [details.get("note"), note]))}
    if missed:
        judged.setdefault("status", "missed")
    return judged
