"""Makes each system call of a save fail in turn, in a process under the shim, and checks what the store then does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
from pathlib import Path
from typing import Any

from checkpoint_crashes.contents import problems_of, tensors_of
from drivetrain.checkpointing import CheckpointError, Store

LIMIT_S = 60.0
CODES = {
    "open": [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOENT],
    "mkdir": [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.ESTALE],
    "fallocate": [errno.ENOSPC, errno.EDQUOT],
    "write": [errno.EDQUOT, errno.ENOSPC, errno.EIO],
    "truncate": [errno.EIO, errno.EDQUOT],
    "fsync": [errno.EIO, errno.EDQUOT, errno.ENOSPC],
    "rename": [errno.EIO, errno.EROFS, errno.ENOSPC],
}

shim: Any = ctypes.CDLL(None)


def check_failure(store: Store, kind: str, call: int, code: int, count: int) -> bool:
    """Lets calls of the kind fail from the given one of them on. Returns False if the save makes no such call."""
    name = f"{kind} fails with {errno.errorcode[code]} from call {call} of its kind on"

    def arm(_: float) -> None:  # in the thread that saves, which has deleted the checkpoint before the last one
        shim.shim_fail(kind.encode(), call, code)

    save = store.save(count, tensors_of(count), {"count": count}, ready=arm)
    save.wait_copied(LIMIT_S)  # training goes on
    with contextlib.suppress(CheckpointError):
        save.result(LIMIT_S)
    shim.shim_fail(b"", -1, 0)
    error = save.exception()
    if error is None:
        return False
    assert isinstance(error, CheckpointError), f"{name}: {error!r}"
    assert errno.errorcode[code] in str(error), f"{name}: {error}"
    assert f"step {count} was not saved" in str(error), f"{name}: {error}"
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == code
    latest = store.latest()
    assert latest is not None, name
    assert latest.verify() == [], name
    # The rename itself may have succeeded when the fsync after it fails: then the checkpoint is complete.
    assert latest.step == count - 1 or (kind == "fsync" and latest.step == count), f"{name}: {latest}"
    return True


def main() -> None:
    directory = Path(sys.argv[1])
    shim.shim_arm(str(directory).encode(), b"")
    count = 1
    failures = 0
    with Store(directory, keep=1, timeout=LIMIT_S) as store:
        store.save(count, tensors_of(count), {"count": count}).result(LIMIT_S)
        for kind, codes in CODES.items():
            for code in codes:
                call, fails = 0, True
                while fails:
                    count += 1
                    fails = check_failure(store, kind, call, code, count)
                    failures += fails
                    call += 1
                    if fails:  # the next save succeeds
                        count += 1
                        saved = store.save(count, tensors_of(count), {"count": count}).result(LIMIT_S)
                        assert saved.step == count
    assert problems_of_any_step(directory) == []
    with Store(directory, keep=1):  # removes what failed deletions left
        left = [entry.name for entry in directory.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]
        assert left == [], left
    print(f"{failures} failures")


def problems_of_any_step(directory: Path) -> list[str]:
    """Returns the problems of the directory, whose steps are the numbers of the saves."""
    return [problem for problem in problems_of(directory, 1) if "has step" not in problem]


if __name__ == "__main__":
    main()
