"""Runs `script.py` of `allocated.py FILE script.py`, and writes the most bytes that torch's CPU allocator gave out."""

import sys
from pathlib import Path

from drivetrain.planner.main_script import load_script
from drivetrain.planner.replay import memory_profile, peak_of

if __name__ == "__main__":
    result, sys.argv = Path(sys.argv[1]).absolute(), sys.argv[2:]
    main, code = load_script(sys.argv[0])
    sys.modules["__main__"] = main
    with memory_profile() as profiled:
        exec(code, main.__dict__)
    result.write_text(str(peak_of(profiled)[0]))
