"""``from ddplaunch import LaunchConfig, launch``: the promises of docs/python-api.md."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs


def python(code: str, tmp_path: Path) -> Any:
    """Run ``code``, which prints JSON last on stdout."""
    done = runs.python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.returncode == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import os, sys\nif os.environ['RANK'] == '1' and sys.argv[1:]: raise ValueError(sys.argv[1])\n")
    return path


def test_launch_returns_the_result(script: Path, tmp_path: Path):
    """torchrun: launcher_api_test 1."""
    result = python(
        """
        import json, signal
        from ddplaunch import LaunchConfig, WorkerConfig, launch
        before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        two = WorkerConfig(nproc_per_node=2)
        ok = launch(LaunchConfig(script="train.py", workers=two))
        bad = launch(LaunchConfig(script="train.py", script_args=("no",), workers=two, max_restarts=1))
        after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        print(json.dumps({
            "ok": [ok.exit_code, ok.outcome, len(ok.attempts), ok.first_failure is None, list(ok.unkillable_pids)],
            "bad": [bad.exit_code, bad.outcome, len(bad.attempts), bad.first_failure.rank],
            "message": bad.first_failure.error.message, "run_dirs": ok.run_dir != bad.run_dir,
            "handlers": before == after,
        }))
        """,
        tmp_path,
    )
    assert result == {
        "ok": [0, "succeeded", 1, True, []],
        "bad": [1, "failed", 2, 1],
        "message": "ValueError: no",
        "run_dirs": True,
        "handlers": True,
    }


def test_launch_works_in_any_thread(script: Path, tmp_path: Path):
    """torchrun: multiprocessing_api_test 5."""
    result = python(
        """
        import json, threading
        from ddplaunch import LaunchConfig, WorkerConfig, launch
        codes = []
        config = LaunchConfig(script="train.py", workers=WorkerConfig(nproc_per_node=2))
        def one(): codes.append(launch(config).exit_code)
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(json.dumps({"codes": codes}))
        """,
        tmp_path,
    )
    assert result == {"codes": [0, 0]}


def test_a_job_that_cannot_start_is_an_exception_with_a_hint(tmp_path: Path):
    result = python(
        """
        import json
        from ddplaunch import LaunchConfig, LaunchError, launch
        try:
            launch(LaunchConfig(script="missing.py"))
        except LaunchError as error:
            print(json.dumps({"message": error.message, "hint": bool(error.hint), "code": error.exit_code}))
        """,
        tmp_path,
    )
    assert result["message"].startswith("missing.py: no such file")
    assert (result["hint"], result["code"]) == (True, 82)


def test_importing_the_package_is_cheap(tmp_path: Path):
    result = python(
        """
        import json, sys
        import ddplaunch
        print(json.dumps([m for m in ("torch", "click", "psutil", "paramiko", "dataclasses") if m in sys.modules]))
        """,
        tmp_path,
    )
    assert result == []


def test_a_launch_leaves_no_thread_and_no_descriptor(script: Path, tmp_path: Path):
    result = python(
        """
        import gc, json, os, threading, time
        from ddplaunch import LaunchConfig, WorkerConfig, launch
        counts = []
        for _ in range(3):
            launch(LaunchConfig(script="train.py", workers=WorkerConfig(nproc_per_node=1)))
            deadline = time.monotonic() + 10
            while True:
                gc.collect()  # A thread that still ends may hold what the one before could not collect.
                if threading.active_count() == 1 or time.monotonic() > deadline: break
                time.sleep(0.05)
            counts.append([threading.active_count(), len(os.listdir("/proc/self/fd"))])
        print(json.dumps(counts))
        """,
        tmp_path,
    )
    assert result == [result[0]] * 3
    assert result[0][0] == 1
