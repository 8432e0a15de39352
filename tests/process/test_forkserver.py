"""The forkserver imports once and stays harmless: no thread, no GPU, nothing shared; else workers are exec'd."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.processes import command_line, is_alive, wait_until
from tests.support.runs import PROGRAMS, Finished, Running, environment, run, start

READY = PROGRAMS / "dump_environ.py"


def modules(folder: Path, **sources: str) -> dict[str, str]:
    """Python modules in ``folder``, and the environment that finds them."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join((str(folder), environment()["PYTHONPATH"]))}


def outputs(finished: Finished, attempt: int = 0) -> list[str]:
    return [file.read_text() for file in sorted(finished.run_dir.glob(f"attempt_{attempt}/*/stdout.log"))]


# Why not to fork.


def reasons(finished: Finished) -> list[str]:
    return re.findall(r"^ddplaunch: workers are started by exec: (.*)$", finished.err, re.MULTILINE)


THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
GPU = """
import os
file = os.open({path!r}, os.O_RDONLY)
"""


def test_a_thread_left_by_an_import_means_exec(tmp_path: Path) -> None:
    env = modules(tmp_path / "modules", starts_thread=THREAD)
    finished = run("-v", "--preload", "starts_thread", "--nproc-per-node", "2", READY, tmp_path, env=env)
    assert finished.returncode == 0, finished.err
    assert reasons(finished) == ["the imports raised the number of threads by 1"]
    assert len(outputs(finished)) == 2


def test_an_open_gpu_means_exec(tmp_path: Path) -> None:
    device = "/dev/nvidia0"
    if os.path.exists(device):
        pytest.skip("this machine's own GPU would be opened")
    env = modules(tmp_path / "modules", opens_gpu=GPU.format(path=device))
    os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
    try:
        finished = run("-v", "--preload", "opens_gpu", "--nproc-per-node", "1", READY, tmp_path, env=env)
    finally:
        os.unlink(device)
    assert finished.returncode == 0, finished.err
    assert reasons(finished) == [f"the imports opened {device}"]


FAILS_IN_WORKERS = """
import os, sys
real = os.setsid
def setsid():
    real()
    if sys._getframe(1).f_locals["spec"].how not in ("store", "member"):
        os.sched_setaffinity(0, {1023})
os.setsid = setsid
"""


def test_a_worker_that_cannot_be_set_up_says_so_in_one_line(tmp_path: Path) -> None:
    env = modules(tmp_path / "modules", fails_in_workers=FAILS_IN_WORKERS)
    finished = run("--preload", "fails_in_workers", "--nproc-per-node", "1", READY, tmp_path, env=env)
    assert finished.returncode != 0
    assert "ddplaunch: cannot set up this process: [Errno 22] Invalid argument" in finished.err
    assert "exit code 126" in finished.err
    assert "Traceback" not in finished.err
    assert "<string>" not in finished.err


def test_a_profiler_means_exec(tmp_path: Path) -> None:
    name = "NSYS_PROFILING_SESSION_ID"
    finished = run("-v", "--nproc-per-node", "1", READY, tmp_path, env={name: "/lib/profiler.so"})
    assert finished.returncode == 0, finished.err
    assert reasons(finished) == [f"{name} is set: the profiler must load at process start"]


@pytest.mark.torch
def test_a_script_that_sets_what_torch_reads_at_its_import_is_not_too_late(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())\n")
    finished = run("-v", "--nproc-per-node", "1", script, env={"OMP_NUM_THREADS": "2"})
    assert outputs(finished) == ["1\n"]
    assert reasons(finished) == [f"{script} sets OMP_NUM_THREADS, which torch reads when it is imported"]


@pytest.mark.torch
def test_what_a_module_sets_before_it_imports_torch_has_its_effect_in_a_fork(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(
        "import os, sys\nassert 'torch' not in sys.modules\n"
        "for name, value in {'OMP_NUM_THREADS': '2', 'TORCH_LOGS': '+dynamo', 'KMP_BLOCKTIME': '1'}.items():\n"
        "    os.environ[name] = value\n"
    )
    (tmp_path / "script.py").write_text(
        "import settings, torch, logging\nprint(torch.get_num_threads(), logging.getLogger('torch._dynamo').level)\n"
    )
    finished = run("--nproc-per-node", "2", tmp_path / "script.py", env={"OMP_NUM_THREADS": "1"})
    assert outputs(finished) == ["2 10\n", "2 10\n"]
    assert finished.err.count("changed KMP_BLOCKTIME before it imported torch") == 1


def test_nothing_is_said_where_workers_are_forked_or_exec_was_asked_for(start_method: str, tmp_path: Path) -> None:
    finished = run("-v", "--start-method", start_method, "--nproc-per-node", "1", READY, tmp_path)
    assert finished.returncode == 0, finished.err
    assert reasons(finished) == []


# What is imported, and how often.

COUNTED = """
import os
with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    file.write(f"{__name__} {os.getpid()}\\n")
IMPORTED_BY = os.getpid()
changes = 0
os.environ["SET_BY_IMPORT"] = "yes"
os.environ["CHANGED_BY_IMPORT"] = "yes"
os.environ["RANK"] = "99"
"""


def test_what_is_preloaded_is_imported_once_and_changed_for_one_rank_only(tmp_path: Path) -> None:
    env = modules(tmp_path / "modules", counted=COUNTED, also=COUNTED)
    options = ("--preload", "also,counted", "--nproc-per-node", "2", "--max-restarts", "1")
    finished = run(*options, PROGRAMS / "shares_module.py", tmp_path, env={**env, "CHANGED_BY_IMPORT": "no"})
    assert finished.returncode == 0, finished.err
    imports = (tmp_path / "modules/imports").read_text().splitlines()
    assert [line.split()[0] for line in imports] == ["also", "counted"]
    forkserver = imports[0].split()[1]
    for attempt in (0, 1):
        first, second = outputs(finished, attempt)
        assert first.startswith(f"imported by {forkserver}, changed 0 times")
        assert second.startswith(f"imported by {forkserver}, changed 0 times")
        assert second.endswith("afterwards 0, json.decoder, True, yes, yes\n")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (None, "No module named 'not_there'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_preload_that_cannot_be_imported_is_told_with_its_reason(
    source: str | None, complaint: str, tmp_path: Path
) -> None:
    env = modules(tmp_path / "modules", **({"not_there": source} if source else {}))
    finished = run("--preload", "not_there", "--nproc-per-node", "2", READY, tmp_path, env=env)
    assert finished.returncode == 82
    assert "not_there cannot be imported" in finished.err
    assert complaint in finished.err
    assert "Remove it from --preload" in finished.err
    assert "ddplaunch/worker" not in finished.err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_an_import_that_takes_long_is_told_with_what_may_delay_it(tmp_path: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists({!r}):\n    time.sleep(0.05)\n"
    path = modules(tmp_path / "lib", mine=waits.format(str(tmp_path / "go")))
    running = start("--preload", "mine", "-m", "ddplaunch.version", env=path)
    running.wait_for(r"importing torch on .* takes long: busy CPUs, or a slow disk$")
    (tmp_path / "go").touch()
    assert running.finish().returncode == 0


def test_what_the_script_seems_to_need_is_not_required(tmp_path: Path) -> None:
    script = tmp_path / "optional.py"
    optional = "try:\n    import torch.no_such\nexcept ImportError:\n    print('without')\n"
    script.write_text(optional + "import torch.no_such_part\n")
    finished = run("--nproc-per-node", "1", script)
    assert outputs(finished) == ["without\n"]
    assert finished.returncode == 1
    assert 'optional.py", line 5, in <module>' in finished.report["first_failure"]["error"]["traceback"]


def test_a_module_beside_the_script_that_hides_another_is_found_as_by_python(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("MINE = True\n")
    (tmp_path / "script.py").write_text("import yaml\nprint(yaml.MINE)\n")
    assert outputs(run("--nproc-per-node", "1", tmp_path / "script.py")) == ["True\n"]


# What it leaves alone.


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def stop(running: Running) -> Finished:
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 128 + signal.SIGTERM
    return finished


@pytest.mark.torch
def test_torch_is_in_the_forkserver_and_neither_in_launcher_nor_agent(tmp_path: Path) -> None:
    options, env = ("-v", "--nproc-per-node", "2"), {"OMP_NUM_THREADS": "4"}
    running = start(*options, READY, tmp_path, "wait", "--lr", "1e-3", env=env)
    workers = [int(match[1]) for match in running.wait_for(r"ready \(pid: (\d+)\)", 2)]
    launcher, agent, forkserver, store = running.pid, running.agent_pid(), running.forkserver_pid(), running.store_pid()
    assert "libtorch" in libraries(forkserver)
    assert "libtorch" not in libraries(launcher)
    assert "libtorch" not in libraries(agent)
    opened = [os.readlink(f"/proc/{forkserver}/fd/{fd}") for fd in os.listdir(f"/proc/{forkserver}/fd")]
    assert not [link for link in opened if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]
    assert "libcuda.so" not in libraries(forkserver)
    # After a fork OpenBLAS's own threads are gone until they are needed.
    assert threads(forkserver) == 1
    for worker in workers:
        assert command_line(worker).endswith(f"-u {READY} {tmp_path} wait --lr 1e-3")
        with open(f"/proc/{worker}/environ") as file:
            assert "LOCAL_RANK=" in file.read()
    assert re.fullmatch(r"ddplaunch store \S+", command_line(store))
    assert reasons(stop(running)) == [], "workers are forked from it"
    assert not any(map(is_alive, (agent, forkserver, store, *workers)))


@pytest.mark.torch
def test_matrices_are_multiplied_in_forks_with_many_threads(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
    finished = run("--nproc-per-node", "2", "--preload", "numpy", PROGRAMS / "multiply.py", env=env)
    assert finished.returncode == 0, finished.err
    assert all(text.endswith("multiplied\n") for text in outputs(finished))


IMPORTED_WHEN_TOLD = """
import os, pathlib, time
folder = pathlib.Path(os.environ["TOLD"])
(folder / "importing").touch()
while not (folder / "go_on").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_scheduler_sends_to_every_process_does_not_end_it(tmp_path: Path, signum: int) -> None:
    env = modules(tmp_path / "modules", imported_when_told=IMPORTED_WHEN_TOLD) | {"TOLD": str(tmp_path)}
    running = start("--preload", "imported_when_told", "--nproc-per-node", "2", READY, tmp_path, env=env)
    wait_until((tmp_path / "importing").exists)
    os.kill(running.forkserver_pid(), signum)
    (tmp_path / "go_on").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert len(outputs(finished)) == 2
