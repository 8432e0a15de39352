"""``launch(function, ...)``: functions as workers, and what they return; the promises of docs/python-api.md."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import environment

CLOUDPICKLE = """
    import io, marshal, pickle, types

    def _function(code, name):
        import __main__
        return types.FunctionType(marshal.loads(code), vars(__main__), name)

    class CloudPickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
                return _function, (marshal.dumps(value.__code__), value.__name__)
            return NotImplemented

    def dumps(value):
        file = io.BytesIO()
        CloudPickler(file).dump(value)
        return file.getvalue()
    """
"""What the real one does with functions of a notebook, as far as a test needs it."""


def run(arguments: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment(), **environ},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def script(tmp_path: Path, code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a script of its own file."""
    (tmp_path / "job.py").write_text(textwrap.dedent(code))
    return run(["job.py", *arguments], tmp_path, **environ)


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_function_of_a_script_returns_values_of_all_ranks(start_method: str, tmp_path: Path):
    code = """
        import json, os, sys
        from pathlib import Path
        from ddplaunch import FunctionResult, launch

        class Point:
            def __init__(self, *at): self.at = at

        def work(a, b=1):
            return Point(int(os.environ["RANK"]), a, b, sys.argv[1])

        if __name__ == "__main__":
            result = launch(work, ("x",), {"b": 2}, nproc_per_node=2, start_method=sys.argv[1])
            assert type(result) is FunctionResult
            result.check()
            assert all(type(value) is Point for value in result.return_values.values())
            values = [result.return_values[rank].at for rank in (0, 1)]
            assert {path.stat().st_mode & 0o777 for path in Path(result.run_dir).rglob("return.pkl")} == {0o600}
            print(json.dumps([values, "torch" in sys.modules]))
        """
    values, has_torch = last_line(script(tmp_path, code, start_method))
    assert values == [[0, "x", 2, start_method], [1, "x", 2, start_method]]
    assert not has_torch


def test_a_function_of_a_module_does_not_import_the_script(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "work.py").write_text("import os\ndef rank(): return int(os.environ['RANK'])\n")
    code = """
        import json, os, sys
        sys.path.insert(0, "lib")
        os.chdir("/")
        from ddplaunch import launch
        import work
        result = launch(work.rank, nproc_per_node=2)
        print(json.dumps([result.return_values[0], result.return_values[1]]))
        """
    code = code.replace('"lib"', repr(str(tmp_path / "lib")))
    assert last_line(script(tmp_path, code)) == [0, 1]


def test_functions_run_on_all_nodes_and_after_restarts(tmp_path: Path):
    """The values are those of the last attempt."""
    code = """
        import json, os
        from ddplaunch import launch

        def work():
            if os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": raise ValueError("once")
            return [int(os.environ[name]) for name in ("RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")]

        if __name__ == "__main__":
            result = launch(work, nnodes=2, nproc_per_node=2, dry_run=True, max_restarts=1)
            print(json.dumps([result.return_values.get(rank) for rank in range(4)]))
        """
    assert last_line(script(tmp_path, code)) == [[0, 0, 1], [1, 0, 1], [2, 1, 1], [3, 1, 1]]


def test_the_exception_of_a_worker_is_shown_and_raised_by_check(tmp_path: Path):
    code = """
        import os
        from ddplaunch import JobFailed, launch

        def work():
            if os.environ["RANK"] == "1": raise ValueError("no luck")

        if __name__ == "__main__":
            result = launch(work, nproc_per_node=2)
            assert (result.outcome, result.exit_code, result.return_values) == ("failed", 1, {})
            try:
                result.check()
            except JobFailed as error:
                print(error.message, error.exit_code, sep="|")
        """
    done = script(tmp_path, code)
    assert "ValueError: no luck|1" in done.stdout
    assert done.stdout.startswith("rank 1 on ")
    page = done.stderr[done.stderr.index("the job failed") :]
    assert 'job.py", line 6, in work' in page
    assert "bootstrap" not in page
    assert "functions/worker.py" not in page
    assert "function.py" not in page


def test_a_rank_that_ends_itself_returns_nothing_and_check_says_so(tmp_path: Path):
    code = """
        import os, sys
        from ddplaunch import JobFailed, launch

        def work():
            if os.environ["RANK"] == "1": sys.exit(0)

        if __name__ == "__main__":
            result = launch(work, nproc_per_node=2)
            assert dict(result.return_values) == {0: None}
            try:
                result.check()
            except JobFailed as error:
                print(error.message)
        """
    assert "no return value of rank 1" in script(tmp_path, code).stdout


def test_values_that_cannot_be_pickled_are_refused(tmp_path: Path):
    code = """
        import threading
        from ddplaunch import UsageError, launch

        def work(*args):
            return threading.Lock()

        if __name__ == "__main__":
            try:
                launch(work, (threading.Lock(),))
            except UsageError as error:
                print(error.message)
            print(launch(work, nproc_per_node=1).first_failure.error.message)
        """
    done = script(tmp_path, code)
    assert "work or its arguments cannot be sent to workers: cannot pickle '_thread.lock' object" in done.stdout
    assert "TypeError: the function returned a lock that cannot be pickled: cannot pickle" in done.stdout


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path):
    code = """
        from ddplaunch import launch
        def work(): pass
        launch(work, nproc_per_node=1)
        """
    done = script(tmp_path, code)
    assert "failed: UsageError: launch was called while a worker imports the script (job.py:" in done.stderr
    assert "hint: Put the call under" in done.stderr


SESSION = "from ddplaunch import launch\ndef work(x): return x + 1\nprint(launch(work, (41,)).return_values[0])"


def test_a_function_of_a_session_needs_cloudpickle(tmp_path: Path):
    done = run(["-S", "-c", f"import sys; sys.modules['cloudpickle'] = None\n{SESSION}"], tmp_path, **_with_packages())
    assert "work or its arguments cannot be sent to workers: it is defined in a notebook" in done.stderr
    assert "hint: Install cloudpickle" in done.stderr
    (tmp_path / "cloudpickle.py").write_text(textwrap.dedent(CLOUDPICKLE))
    assert last_line(run(["-c", SESSION], tmp_path)) == 42


def _with_packages() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.torch
@pytest.mark.slow
def test_tensors_go_and_come_but_not_one_in_shared_memory_wherever_it_is_in_the_arguments(tmp_path: Path):
    code = """
        import copy, functools, json, torch
        import torch.distributed as dist
        from ddplaunch import UsageError, launch

        def work(_model, tensor, *_):
            dist.init_process_group("gloo")
            value = tensor + dist.get_rank() + 1
            dist.all_reduce(value)
            dist.destroy_process_group()
            return value

        if __name__ == "__main__":
            model, tensor = torch.nn.Linear(2, 2).share_memory(), torch.zeros(2).share_memory_()
            for function, args, kwargs in (
                (work, (tensor,), {}),
                (work, (), {"a": [{"b": model}]}),
                (functools.partial(work, model.weight.data[0]), (), {}),
                (work, (lambda: 0, tensor), {}),
            ):
                try:
                    launch(function, args, kwargs)
                except UsageError as error:
                    print(error.message)
            copies = copy.deepcopy(model), tensor.clone(), tensor.to_sparse().clone(), torch.ones(2, device="meta")
            result = launch(work, copies, nproc_per_node=2)
            print(json.dumps([value.tolist() for value in result.return_values.values()]))
        """
    (tmp_path / "cloudpickle.py").write_text(textwrap.dedent(CLOUDPICKLE))
    done = script(tmp_path, code)
    refused = "an argument is a tensor in shared memory (share_memory_), of which each worker would get a copy"
    assert done.stdout.splitlines()[:-1] == [refused] * 4, done.stderr
    assert last_line(done) == [[3.0, 3.0]] * 2
