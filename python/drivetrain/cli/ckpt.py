"""Implements `drivetrain ckpt`, which lists, verifies, shows, exports and cleans up checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path

import torch

from ..checkpointing import Checkpoint, CheckpointError, Encryption
from ..checkpointing.state.training_state import state_dicts
from ..checkpointing.store import directory as disk
from ..checkpointing.store.audit import AUDIT, AuditLog
from ..checkpointing.store.layout import step_name
from ..checkpointing.store.reading import complete_checkpoints, find_checkpoints, survey
from ..checkpointing.store.save import write_tensors
from ..checkpointing.tiers import TIERS
from ..notebook import text_table

_MOST_SHOWN = 2000  # characters of a state
_EXPORT_SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors", "dcp": ""}


def run(args: argparse.Namespace) -> int:
    """Runs the action. Returns 0, or 1 if something is damaged, or 2 if the arguments are wrong."""
    actions = {"ls": _list, "verify": _verify, "show": _show, "export": _export, "gc": _collect}
    try:
        return actions[args.action](args)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"drivetrain ckpt {args.action}: {error}", file=sys.stderr)
        return 2


def _list(args: argparse.Namespace) -> int:
    rows, errors = [], []
    for found in _found(args):
        if isinstance(found, Checkpoint):
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created))
            is_open = found.key_id is None or _encryption(args) is not None
            count = sum(len(found.names(rank)) for rank in range(found.world_size)) if is_open else "?"
            size = f"{found.nbytes / 2**20:,.1f} MiB"
            rows.append((str(found.step), saved, str(found.world_size), str(count), size, found.key_id or "", "intact"))
        else:
            errors.append(str(found))
            rows.append(("?", "", "", "", "", "", "damaged"))
    print(text_table(("step", "saved", "ranks", "tensors", "size", "key", "metadata"), rows))
    for line in _tiers(args.directory):
        print(line)
    for error in errors:
        print(f"damaged: {error}", file=sys.stderr)
    return int(bool(errors))


def _tiers(directory: Path) -> list[str]:
    """Returns what the last run has written about its other tiers, a line for each."""
    try:
        found = json.loads((directory / TIERS).read_text())
    except FileNotFoundError:
        return []
    lines = []
    for tier in found["remotes"]:
        parts = [f"step {tier['newest']} is complete"] if tier["newest"] is not None else []
        parts += [f"step {step} is being uploaded" for step in tier["pending"]]
        parts += [f"step {step} failed" for step in tier["failed"]]
        parts += [tier["error"]] if tier["error"] is not None else []
        lines.append(f"{tier['tier']}: {', '.join(parts) or 'nothing was uploaded yet'}")
    return lines


def _verify(args: argparse.Namespace) -> int:
    is_damaged, count = False, 0
    for found in _found(args):
        count += 1
        if not isinstance(found, Checkpoint):
            is_damaged = True
            print(f"damaged: {found}")
            continue
        faults = found.verify()
        is_damaged |= bool(faults)
        for fault in faults:
            print(f"damaged: {found.path.name}/{fault}")
        if not faults:
            is_locked = found.key_id is not None and _encryption(args) is None
            note = " (checksums only: no key was given)" if is_locked else ""
            print(f"intact: {found.path.name}, {found.nbytes:,} bytes{note}")
    if not count:
        print(f"{args.directory} has no checkpoint")
    return int(is_damaged)


def _show(args: argparse.Namespace) -> int:
    checkpoint = _chosen(args)
    print(f"{checkpoint.path}: step {checkpoint.step}, {checkpoint.world_size} ranks")
    rows = []
    checkpoint.record_load(0)
    ranks = range(checkpoint.world_size) if args.rank is None else [args.rank]
    for rank in ranks:
        shapes, dtypes = checkpoint.shapes(rank), checkpoint.dtypes(rank)
        for name in checkpoint.names(rank):
            rows.append((name, str(rank), str(dtypes[name]).removeprefix("torch."), str(list(shapes[name]))))
    print(text_table(("tensor", "rank", "dtype", "shape"), rows))
    for rank in ranks:
        text = json.dumps(checkpoint.state(rank))
        more = f"... ({len(text):,} characters)" if len(text) > _MOST_SHOWN else ""
        print(f"state of rank {rank}: {text[:_MOST_SHOWN]}{more}")
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.format == "dcp" and args.out is not None:
        from ..checkpointing.frameworks.dcp import export_dcp

        checkpoint = _chosen(args)
        export_dcp(checkpoint, args.out, args.rank or 0)
        print(f"wrote step {checkpoint.step} to {args.out}")
        return 0
    suffixes = [suffix for name, suffix in _EXPORT_SUFFIXES.items() if suffix and args.format in (None, name)]
    if args.out is None or args.out.suffix not in suffixes:
        expected = f"a file that ends with {' or '.join(suffixes)}" if suffixes else "a new folder"
        raise ValueError(f"--out is {args.out}, expected {expected}")
    if args.out.exists():
        raise ValueError(f"--out is {args.out}, which exists: choose a new file")
    checkpoint = _chosen(args)
    ranks = range(checkpoint.world_size) if args.rank is None else [args.rank]
    tensors = {}
    for rank in ranks:
        for name, tensor in checkpoint.load(rank=rank).items():
            # Ranks may store parts of the same tensor under one name.
            tensors[f"rank{rank}.{name}" if name in tensors else name] = tensor
    partial = args.out.with_name(args.out.name + ".part")
    if args.out.suffix == ".pt":
        found = state_dicts(checkpoint, args.rank or 0)
        if found is None:
            found = {"tensors": tensors, "states": [checkpoint.state(r) for r in ranks]}
        with partial.open("wb") as file:  # torch itself would raise RuntimeError for a folder that is not there
            torch.save({"step": checkpoint.step, **found}, file)
    else:
        write_tensors(partial, tensors)
    partial.rename(args.out)
    print(f"wrote {len(tensors)} tensors of step {checkpoint.step} to {args.out}")
    return 0


def _collect(args: argparse.Namespace) -> int:
    if args.keep is not None and args.keep < 1:
        raise ValueError(f"--keep is {args.keep}, expected at least 1")
    if not args.directory.is_dir():
        raise ValueError(f"directory is {args.directory}, which is no directory")
    with closing(disk.Lock(args.directory.absolute())):
        complete, damaged = survey(args.directory)
        old = complete[: -args.keep] if args.keep is not None else []
        # A checkpoint that this user may not read may be intact.
        unread = [one for one in damaged if isinstance(one.__cause__, PermissionError)]
        gone = [one.path for one in old] + [one.folder for one in damaged if args.damaged and one not in unread]
        folders = [*disk.leftovers(args.directory), *map(disk.retire, gone)]
        removed = [folder for folder in folders if disk.remove_files(folder)]
    kept = len(folders) - len(removed)
    print(f"removed {len(removed)} folders" + (f", kept {kept} that hold other files" if kept else ""))
    for error in unread:
        print(f"drivetrain ckpt gc: kept what it may not read: {error}", file=sys.stderr)
    if (audit := _audit(args.directory)) is not None:
        for one in old:
            audit.append("delete", one.path, one.step, one.nbytes, one.key_id)
    return int(kept > 0)


def _found(args: argparse.Namespace) -> list[Checkpoint | Exception]:
    if not args.directory.is_dir():
        raise ValueError(f"directory is {args.directory}, which is no directory")
    if args.step is not None:
        return [_chosen(args)]
    found: list[Checkpoint | Exception] = list(find_checkpoints(args.directory, _encryption(args)))
    return sorted(found, key=lambda one: one.serial if isinstance(one, Checkpoint) else -1)


def _chosen(args: argparse.Namespace) -> Checkpoint:
    if args.step is not None:
        return Checkpoint(args.directory / step_name(args.step), _encryption(args), _audit(args.directory))
    complete = complete_checkpoints(args.directory, _encryption(args), _audit(args.directory))
    if not complete:
        raise ValueError(f"directory is {args.directory}, which has no complete checkpoint")
    return complete[-1]


def _encryption(args: argparse.Namespace) -> Encryption | None:
    if args.key_file is None and args.key_env is None:
        return None
    return Encryption(key_file=args.key_file, key_env=args.key_env, accept_plain=args.accept_plain)


def _audit(directory: Path) -> AuditLog | None:
    """Returns the audit log of a directory whose runs keep one."""
    return AuditLog(directory / AUDIT) if (directory / AUDIT).exists() else None
