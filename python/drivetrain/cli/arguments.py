"""Declares the arguments of every command. It imports nothing of torch, so that help and completion are quick."""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}
_BENCH = """Measures drivetrain against torch and prints one table per topic.

Both sides run interleaved in one process. A row shows medians, the median of the paired ratios and its 95 % bootstrap
interval. The last column shows if the project's own target was met."""
_TOPICS = {
    "all": "optim, ddp and comm (the default)",
    "optim": "steps of optimizers on the CPU",
    "ddp": "DistributedDataParallel on 2 CPU ranks",
    "comm": "all-reduce between CPU ranks of this machine",
    "allreduce": "every transport by size, in the columns of nccl-tests; also under torchrun",
}


class Parser(argparse.ArgumentParser):
    """Adds the nearest option or choice to an error about an unknown one."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"(?:invalid choice: '|unrecognized arguments: )([^'\s=]+)", message)
        near = difflib.get_close_matches(wrong[1], _words(self), n=1) if wrong else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Returns every option and choice of a parser and of its commands."""
    words = []
    for action in parser._actions:
        words += [*action.option_strings, *map(str, action.choices or ())]
        if isinstance(action, argparse._SubParsersAction):
            words += [word for command in action.choices.values() for word in _words(command)]
    return words


def of_run(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `run`. All arguments after the script's name belong to the script."""
    parser.usage = (
        "drivetrain run [-h] [--optim] [--ddp NAME=VALUE]... [--with-monitor] [--monitor-to SINK]... [-m] script.py "
        "[ARGUMENT]..."
    )
    parser.add_argument("--optim", action="store_true", help="replace torch's optimizers too")
    parser.add_argument(
        "--ddp",
        metavar="NAME=VALUE",
        type=_ddp_default,
        action="append",
        default=[],
        help="default of a DistributedDataParallel argument that the script does not pass; may be repeated",
    )
    # torchrun would take "--monitor" as the beginning of its own --monitor-interval, even after the script's name.
    parser.add_argument("--with-monitor", action="store_true", help="show where the time of each step goes")
    parser.add_argument(
        "--monitor-to",
        metavar="SINK",
        action="append",
        default=[],
        help="monitor, and write to a sink such as jsonl:run.jsonl; may be repeated",
    )
    parser.add_argument("-m", dest="as_module", action="store_true", help="run a module, as python -m does")
    _script_and_arguments(parser, "path of the script, or name of the module with -m")


def of_try(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `try`. All arguments after the script's name belong to the script."""
    parser.usage = "drivetrain try [-h] [OPTION]... script.py [ARGUMENT]..."
    parser.epilog = "Files of the script stay in temporary folders, and programs that it starts do nothing."
    parser.add_argument("--steps", type=_count, default=30, metavar="N", help="optimizer steps of a run (default: 30)")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="runs of each for the times (default: 3)")
    parser.add_argument("--limit", type=_seconds, default=600.0, metavar="S", help="seconds of a run (default: 600)")
    parser.add_argument("--optim", action="store_true", help="also try drivetrain's optimizers")
    parser.add_argument("--shard", choices=["optimizer", "gradients"], help="also try to divide these among the ranks")
    parser.add_argument(
        "--state-bits", type=int, choices=[32, 16, 8, 4], help="also try this format of optimizer states"
    )
    parser.add_argument("--master-bits", type=int, choices=[32, 24], help="also try this format of master weights")
    parser.add_argument("--budget", metavar="BYTES", help="also try this budget of activations, such as 60%% or 2GiB")
    parser.add_argument(
        "--ranks", type=_counts, metavar="N,N", help="instead compare the bits on these numbers of ranks"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    _script_and_arguments(parser, "path of the script")


def of_explain(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `explain`. All arguments after the script's name belong to the script."""
    parser.usage = "drivetrain explain [-h] [OPTION]... script.py [ARGUMENT]..."
    parser.epilog = "The script begins with its newest checkpoint. It writes nothing, and starts no program."
    parser.add_argument(
        "--step", type=_count, metavar="N", help="the step that spikes: begin with a checkpoint before it"
    )
    parser.add_argument(
        "--steps", type=_count, default=200, metavar="N", help="optimizer steps to look at (default: 200)"
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=10.0,
        metavar="X",
        help="deviations from the median that a spike has (default: 10)",
    )
    parser.add_argument("--limit", type=_seconds, default=600.0, metavar="S", help="seconds of a run (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw losses and norms around it as .svg or .png")
    _script_and_arguments(parser, "path of the script")


def _script_and_arguments(parser: argparse.ArgumentParser, script: str) -> None:
    parser.add_argument("script", help=script)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the script, passed unchanged")
    plain = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        namespace, others = plain(args, namespace)
        before = list(args or ())[: -len(namespace.arguments) or None]
        if before[-2:] == [namespace.script, "--"]:  # argparse took it for its own
            namespace.arguments.insert(0, "--")
        return namespace, others

    parser.parse_known_args = parse  # type: ignore[method-assign]


def of_bench(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `bench`."""
    parser.description = _BENCH
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(topic="all", threads=2, rounds=31, json=None)
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC")
    for topic, summary in _TOPICS.items():
        one = topics.add_parser(topic, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if topic in ("all", "optim"):
            one.add_argument("--threads", type=_count, default=2, help="CPU threads of a process (default: 2)")
        if topic != "allreduce":
            one.add_argument("--rounds", type=_count, default=31, help="timed rounds per row (default: 31)")
        one.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
        if topic == "allreduce":
            one.add_argument("--ranks", type=_count, default=2, metavar="N", help="ranks without torchrun (default: 2)")
            one.add_argument("--transport", metavar="NAME", help="measure this one only")
            one.add_argument("--minbytes", default="1KiB", metavar="BYTES", help="smallest buffer (1KiB)")
            one.add_argument("--maxbytes", default="64MiB", metavar="BYTES", help="largest buffer (64MiB)")
            one.add_argument("--stepfactor", type=_count, default=4, help="between two sizes (default: 4)")


def of_plan(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `plan`. Options may stand before or after the script."""
    parser.usage = "drivetrain plan [-h] [OPTION]... script.py [OPTION or ARGUMENT]... [-- ARGUMENT...]"
    parser.epilog = "Options may follow the script. Options unknown to plan, and all after --, belong to the script."
    parser.allow_abbrev = False  # options like plan's may be the script's
    _plan_options(parser)
    parser.add_argument("script", help="path of the script")
    plain = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        namespace, others = plain(given[:end], namespace)
        namespace.arguments = [*others, *given[end + 1 :]]
        return namespace, []

    # argparse itself cannot tell "script.py --" from "script.py".
    parser.parse_known_args = parse  # type: ignore[method-assign]


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="device of the table, or cpu (default: h100)")
    parser.add_argument(
        "--gpus", type=_layout, default=(1, 1), metavar="HOSTSxGPUS", help="such as 8x8, or 8 (default: 1)"
    )
    parser.add_argument("--batch", type=_count, metavar="N", help="batch size of every DataLoader, per rank")
    parser.add_argument("--budget", metavar="BYTES", help="most bytes of activations kept for backward, such as 20GiB")
    parser.add_argument(
        "--accumulate", type=_count, default=1, metavar="N", help="micro-batches of a step (default: 1)"
    )
    parser.add_argument("--shard", choices=["optimizer", "gradients"], help="divide these among the ranks")
    parser.add_argument("--state-bits", type=int, choices=[32, 16, 8, 4], help="format of optimizer states")
    parser.add_argument("--master-bits", type=int, choices=[32, 24], help="format of master weights")
    parser.add_argument("--release", action="store_true", help="free each gradient in backward")
    parser.add_argument("--expandable", action="store_true", help="use expandable segments of CUDA's allocator")
    parser.add_argument("--devices", type=Path, metavar="FILE", help="TOML file with more devices")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="with --gpu cpu: measure operations and the script's iterations here, for a minute at most",
    )
    parser.add_argument("--price", type=Path, metavar="FILE", help="TOML file with your prices")
    parser.add_argument("--steps", type=_count, metavar="N", help="optimizer steps of the run, for its time and price")
    parser.add_argument("--questions", action="store_true", help="also say what fits, and which options help")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="JSONL file of drivetrain.Monitor: print the errors"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory over the step as .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")


def of_ckpt(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `ckpt`."""
    parser.add_argument("action", choices=["ls", "verify", "show", "export", "gc"], help="what to do")
    parser.add_argument("directory", type=Path, help="the directory that the run saves to")
    parser.add_argument(
        "--step", type=int, metavar="N", help="this checkpoint (default: all; show, export: the newest)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="for export: a new file, .pt for torch.load or .safetensors for tensors alone; a new folder for dcp",
    )
    parser.add_argument(
        "--format",
        choices=["torch", "safetensors", "dcp"],
        help="for export: what reads it (default: by the ending of --out); dcp: torch.distributed.checkpoint",
    )
    parser.add_argument("--rank", type=int, help="for export and show: the tensors of this rank alone")
    parser.add_argument("--keep", type=int, metavar="N", help="for gc: also delete all but the newest N checkpoints")
    parser.add_argument(
        "--damaged", action="store_true", help="for gc: also delete checkpoints that `ls` calls damaged"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key-file", type=Path, metavar="FILE", help="keys of encrypted checkpoints, one per line")
    keys.add_argument("--key-env", metavar="NAME", help="the environment variable that has the keys")
    parser.add_argument(
        "--accept-plain", action="store_true", help="with a key: also read checkpoints that are not encrypted"
    )


def of_monitor(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `monitor`."""
    parser.epilog = "`watch drivetrain monitor run.jsonl` follows a run that is in progress."
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSONL files of drivetrain.Monitor; several are compared"
    )


def of_doctor(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `doctor`."""
    parser.epilog = "Under torchrun (torchrun ... -m drivetrain doctor) rank 0 prints for all ranks."
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="test the directory that checkpoints go to")
    parser.add_argument(
        "--timeout", type=_seconds, default=20.0, metavar="S", help="seconds to wait for ranks (default 20)"
    )


def of_env(parser: argparse.ArgumentParser) -> None:
    """Declares that `env` has no arguments."""
    parser.epilog = "Paste the output into a bug report. `drivetrain doctor` checks what this command only lists."


def _ddp_default(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _layout(text: str) -> tuple[int, int]:
    matched = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if matched is None or not int(matched[2]) or matched[1] == "0":
        raise argparse.ArgumentTypeError(f"'{text}' is not HOSTSxGPUS, such as 8x8, or a number of GPUs of one host")
    return int(matched[1] or 1), int(matched[2])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds
