"""Where a worker was, by what faulthandler wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ddplaunch
from ddplaunch.features.hangs import stack_dumps
from tests.support import golden

PACKAGE = Path(ddplaunch.__file__).parent


def test_the_scripts_own_frame_and_what_it_called_or_the_debugger() -> None:
    def found(text: str) -> str:
        text = text.replace("PACKAGE", str(PACKAGE))
        return stack_dumps.debugger(text) or stack_dumps.whereabouts(text)

    golden.check_answers("stack_dumps", found)


def test_what_this_interpreter_writes_is_understood(tmp_path: Path) -> None:
    script, stacks = tmp_path / "train.py", tmp_path / "stacks"
    script.write_text(
        "import faulthandler, sys\n"
        "def step():\n"
        "    with open(sys.argv[1], 'w') as file: faulthandler.dump_traceback(file, all_threads=True)\n"
        "step()\n"
    )
    subprocess.run([sys.executable, script, stacks], check=True)
    assert stack_dumps.whereabouts(stacks.read_text()) == "train.py:3 in step"
