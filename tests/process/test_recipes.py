"""docs/recipes.md: every command of it is run; stand-ins have the place of tools that are not here."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tests.support.runs import ROOT, Finished, Running, environment, unused_port

PAGE = (ROOT / "docs/recipes.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])

SHOW = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:], flush=True)\n"
ONE = """
while [ "$1" != IMAGE ]; do given="$given $1"; shift; done
shift
echo "given:$given"
exec "$@"
"""


def block(title: str, number: int = 0, language: str = "sh") -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)[number]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.py; ``ddplaunch`` and ``python`` of this checkout are in PATH."""
    program(tmp_path, "ddplaunch", f'exec "{sys.executable}" -m ddplaunch $MORE "$@"')
    program(tmp_path, "python", f'exec "{sys.executable}" "$@"')
    (tmp_path / "train.py").write_text(SHOW)
    path = os.pathsep.join((str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    monkeypatch.setenv("PATH", path)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def save(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def begin(folder: Path, text: str, **env: str) -> Running:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Running(subprocess.Popen(["bash", "-ec", text], cwd=folder, env=environment(env), **options))


def ran(folder: Path, text: str, **env: str) -> Finished:
    done = begin(folder, text, **env).finish()
    assert done.returncode == 0, done.err
    return done


def test_each_recipe_has_a_test():
    code = Path(__file__).read_text()
    assert [title for title in SECTIONS if f'"{title}"' not in code] == []


def test_docker(here: Path):
    program(here, "docker", ONE)
    title = "Run in a Docker container"
    done = ran(here, block(title))
    assert "rank 0" in done.out
    assert all(f" {option}" in done.out for option in re.findall(r"`(--(?:init|ipc)[^`,]*)`", SECTIONS[title]))


def test_a_program_that_starts_torchrun_starts_ddplaunch(here: Path):
    """With the command of docs/guides.md."""
    link = re.search(r"`(ln -s .* ~/first/torchrun)`", (ROOT / "docs/guides.md").read_text())
    assert link
    text = f"mkdir first; {link[1]}; PATH=~/first:$PATH; torchrun --standalone --nproc-per-node=2 train.py"
    done = ran(here, text, HOME=str(here))
    assert sorted(re.findall(r"rank \d", done.out)) == ["rank 0", "rank 1"]
    assert "ddplaunch: succeeded" in done.err


def test_setup_on_hosts_is_passed_whole(here: Path):
    for line in block("Use conda or modules on other machines").splitlines():
        plan = ran(here, line, MORE="--plan")
        assert re.search(r"module load cuda|conda activate train", plan.out), plan.out


def test_two_jobs(here: Path):
    done = ran(here, block("Run two jobs on one machine"), MORE="--dry-run")
    assert sorted(re.findall(r"rank (\d) --lr (\S+)", done.out)) == sorted(
        (str(rank), rate) for rank in range(4) for rate in ("1e-3", "1e-4")
    )


def test_code_is_brought(here: Path):
    (here / ".gitignore").touch()
    done = ran(here, block("Bring the code to the other machines"), MORE="--plan")
    assert f"the code in {here}" in " ".join(done.out.split()).replace("- ", "-")
    assert "each host gets what it lacks of them" in done.out


def test_one_rank_is_profiled(here: Path):
    (here / "train.py").write_text(f"{SHOW}import time\nend = time.time() + 0.3\nwhile time.time() < end: 1\n")
    wrapper, command, nsys = (block("Profile one rank", number) for number in range(3))
    save(here, "profile.sh", wrapper)
    assert "rank 0" in ran(here, command).out
    assert "<svg" in (here / "rank1.svg").read_text()
    program(here, "nsys", 'echo "nsys $*"')
    save(here, "profile.sh", re.sub(r" +exec py-spy.*\n", nsys, wrapper))
    done = ran(here, command)
    assert "nsys profile --trace cuda,nvtx --output rank1 python train.py" in done.out
    assert re.findall(r"rank \d\b(?! python)", done.out) == ["rank 0"]


def test_a_debugger_attaches_to_one_rank(here: Path):
    title = "Attach VS Code's debugger to one rank"
    port = unused_port()
    given = json.loads(block(title, language="json"))["configurations"][0]
    wrapper = block(title)
    assert "{host}:{port} ".format(**given["connect"]) in wrapper
    save(here, "debug.sh", wrapper.replace(":5678 ", f":{port} "))
    running = begin(here, block(title, 1))
    running.wait_for("rank 1")
    wait_until(lambda: connects(port), 30)
    with socket.create_connection(("127.0.0.1", port)) as client:
        say(client, 1, "initialize", {"adapterID": "test"})
        say(client, 2, "attach", given)
        client.settimeout(30)
        heard = b""
        while b'"initialized"' not in heard:
            heard += client.recv(4096) or pytest.fail(f"the debugger has left: {heard!r}")
        say(client, 3, "configurationDone", {})
        running.wait_for("rank 0")
        assert running.finish().returncode == 0


def connects(port: int) -> bool:
    """Something listens at the port; looked up in /proc, because debugpy takes a connection for its client."""
    return f"0100007F:{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


def say(client: socket.socket, number: int, name: str, arguments: dict[str, Any]) -> None:
    """A request of VS Code's debug protocol."""
    body = json.dumps({"seq": number, "type": "request", "command": name, "arguments": arguments}).encode()
    client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def test_workers_save_on_sigterm(here: Path):
    before = "import os, signal, threading, time\nrank, first_step = int(os.environ['RANK']), 0\n"
    before += "def train(step):\n    time.sleep(0.05)\n    print('step', step, flush=True)\n"
    before += "def save(step):\n    open('saved', 'w').write('saved')\n"
    (here / "train.py").write_text(before + block("Save a checkpoint on SIGTERM", language="python"))
    for signum in (signal.SIGTERM, signal.SIGINT):
        running = begin(here, f"exec {block('Save a checkpoint on SIGTERM')}")
        running.wait_for("step 1$", 2)
        running.signal(signum)
        assert running.finish().returncode == 128 + signum
        assert (here / "saved").read_text() == "saved"
        (here / "saved").unlink()


def test_one_stream_is_read(here: Path):
    """The run is named: ``last`` may be one of another test."""
    done = ran(here, "ddplaunch --nproc-per-node 4 --no-python sh -c 'echo out $RANK; echo err $RANK >&2'")
    command = block("Read one stream of one rank on another machine")
    assert ran(here, command.replace("last", done.run_dir.name)).out == "err 3\n"


def test_uninstalling_leaves_nothing(here: Path):
    """In a home of its own, which a run fills first; pip is a stand-in."""
    program(here, "pip", 'echo "pip $*"')
    home = {"HOME": str(here / "home"), "XDG_STATE_HOME": ""}
    ran(here, "mkdir -p home/.local/state; ddplaunch --nproc-per-node 2 train.py", **home)
    assert list(here.glob("home/.local/state/ddplaunch/*/report.json"))
    assert "pip uninstall --yes ddplaunch" in ran(here, block("Uninstall"), **home).out
    assert [path for path in (here / "home").rglob("*") if not path.is_dir()] == []


def test_without_a_network(here: Path):
    assert "rank 0" in ran(here, block("Telemetry")).out
