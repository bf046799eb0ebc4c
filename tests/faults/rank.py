"""Becomes a rank of a round, or the process that holds its /dev/shm: `python -m faults.rank REQUEST`.

REQUEST is JSON: {"folder", "rank", "plan", "room", "host"}, or {"folder", "room_bytes"}. The process writes its number
to a file. A rank ends as a script does: its exception goes to stderr and the interpreter shuts down.
"""

import json
import os
import sys
from pathlib import Path

import torch

from faults import hosts, room, training
from faults.plan import Round


def main() -> None:
    request = json.loads(sys.argv[1])
    folder, rank = Path(request["folder"]), request.get("rank", "room")
    training.note(folder, f"pid-{rank}", str(os.getpid()))
    torch.set_num_threads(1)
    if rank == "room":
        room.hold(request["room_bytes"], folder)
        return
    if request["room"] is not None:
        room.enter(request["room"])
    if request["host"] is not None:
        hosts.enter(request["host"])
    training.train(Round(**request["plan"]), rank, folder)


if __name__ == "__main__":
    main()
