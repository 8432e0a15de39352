"""Where a worker was, by what faulthandler wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.protocol import stack_dump

PACKAGE = Path(ddplaunch.__file__).parent
HEAD = "Current thread 0x00007f30 (most recent call first):\n"
OTHER = 'Thread 0x00007f31 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
LIBRARY = '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
OWN = '  File "/home/ada/train.py", line 41 in step\n'
BOOTSTRAP = '  File "<frozen runpy>", line 88 in _run_code\n'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (HEAD + OWN + BOOTSTRAP, "train.py:41 in step"),
        (OTHER + HEAD + LIBRARY + OWN, "train.py:41 in step (all_reduce, distributed_c10d.py:3252)"),
        (HEAD.replace("Current thread", "Thread") + OWN, "train.py:41 in step"),
        (
            HEAD + LIBRARY + f'  File "{PACKAGE}/worker/bootstrap.py", line 62 in run\n' + OWN + BOOTSTRAP,
            "train.py:41 in step (all_reduce, distributed_c10d.py:3252)",
        ),
        (HEAD + LIBRARY + BOOTSTRAP, "<frozen runpy>:88 in _run_code (all_reduce, distributed_c10d.py:3252)"),
        (HEAD + "  <no Python frame>\n", ""),
        (HEAD, ""),
        ("", ""),
        ('  File "half', ""),
    ],
)
def test_the_scripts_own_frame_and_what_it_called(text: str, place: str) -> None:
    assert stack_dump.whereabouts(text) == place


PDB = '  File "/usr/lib/python3.11/pdb.py", line 363 in interaction\n' + OWN
PYDEVD = '  File "/venv/debugpy/_vendored/pydevd/pydevd.py", line 2195 in {}\n'


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (HEAD + OWN, ""),
        (HEAD + PDB, "pdb"),
        (OTHER + HEAD + PDB, "pdb"),
        (HEAD + PDB + OTHER + HEAD + OWN, "pdb"),
        (HEAD + PYDEVD.format("_do_wait_suspend") + HEAD + OWN, "debugpy"),
        (HEAD + PYDEVD.format("_on_run") + HEAD + OWN, ""),
        (HEAD + '  File "/home/ada/game.py", line 3 in interaction\n' + HEAD + OWN, ""),
        ("", ""),
    ],
    ids=["none", "main", "main, others", "other", "debugpy", "debugpy runs", "no debugger", "nothing"],
)
def test_a_debugger_is_found_in_every_thread(text: str, name: str) -> None:
    assert stack_dump.debugger(text) == name


def test_what_this_interpreter_writes_is_understood(tmp_path: Path) -> None:
    script, stacks = tmp_path / "train.py", tmp_path / "stacks"
    script.write_text(
        "import faulthandler, sys\n"
        "def step():\n"
        "    with open(sys.argv[1], 'w') as file: faulthandler.dump_traceback(file, all_threads=True)\n"
        "step()\n"
    )
    subprocess.run([sys.executable, script, stacks], check=True)
    assert stack_dump.whereabouts(stacks.read_text()) == "train.py:3 in step"
