"""A real SLURM over virtual nodes: munge, a controller on the launcher's machine, and a slurmd on every node."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.nodes import LAB_ADDRESS, Lab, Node, own_environ
from tests.support.processes import wait_until
from tests.support.runs import TIMEOUT_S, Running, environment

CPUS = 8
GPUS = 4
"""That a node says it has; SLURM checks nothing of it here."""

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_UP_S = 30.0

ASK_S = 0.2
"""Between two questions to SLURM: each is a process."""


def why_not() -> str:
    """Why there can be no SLURM here; empty if there can."""
    missing = [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]
    return f"a SLURM needs {', '.join(missing)}" if missing else ""


class Slurm:
    """A cluster of a lab's nodes. Commands run on the lab's machine for launchers."""

    def __init__(self, lab: Lab, tree_width: int = 50) -> None:
        """To more than ``tree_width`` nodes SLURM's messages go by way of others; 50 is its default."""
        self.lab = lab
        self._tree_width = tree_width
        self.conf = lab.folder / "slurm.conf"
        self._munge = lab.folder / "munge"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons; what jobs have left goes on, to be found."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        for node in self.lab.nodes:
            for pid in self._own_pids(node):
                os.kill(pid, signal.SIGKILL)

    def environ(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """For SLURM's commands."""
        return {**environment(extra), "SLURM_CONF": str(self.conf), "PATH": _PATH}

    def start(self, command: Sequence[str | Path], env: dict[str, str] | None = None, **popen: Any) -> Running:
        """Start one of SLURM's commands in the background."""
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return Running(self.lab.popen(command, env=self.environ(env), **(options | popen)))

    def run(self, *command: str | Path) -> str:
        """Run one of SLURM's commands to its end. Returns what it printed."""
        done = self.lab.run(command, env=self.environ())
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout

    def batch(self, line: str, log: Path, *options: str) -> Batch:
        """Queue a job whose script is ``line``; all that it prints goes to ``log``."""
        command = ["sbatch", "--parsable", "--open-mode=append", "--output", log, *options, "--wrap", line]
        return Batch(self, self.run(*command).strip(), log)

    def kill_all(self, node: Node) -> None:
        """All that runs on ``node`` is gone, its slurmd too."""
        for pid in node.pids():
            with contextlib.suppress(ProcessLookupError):  # An agent's end is that of its workers.
                os.kill(pid, signal.SIGKILL)

    def start_slurmd(self, node: Node) -> None:
        """Also after ``kill_all``."""
        enter = ["nsenter", "--target", str(node.init_pid), "--all"]
        self._daemon([*enter, "slurmd", "-D", "-N", node.name, "-f", str(self.conf)])

    def leftovers(self) -> dict[str, dict[int, str]]:
        """What jobs have left on nodes, by node name."""
        left = self.lab.leftovers()
        pids = {name: {pid: line for pid, line in found.items() if not _is_ours(line)} for name, found in left.items()}
        return {name: found for name, found in pids.items() if found}

    def _own_pids(self, node: Node) -> list[int]:
        return [pid for pid, line in node.pids().items() if _is_ours(line)]

    def _start(self) -> None:
        self._write_files()
        key, socket = self._munge / "key", self._munge / "socket"
        files = [f"--{name}-file={self._munge / name}" for name in ("log", "pid", "seed")]
        self._daemon(["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files])
        wait_until(socket.exists, _UP_S)
        self._daemon([*self.lab.prefix, "slurmctld", "-D", "-f", str(self.conf)])
        for node in self.lab.nodes:
            self.start_slurmd(node)
        wait_until(lambda: self.is_idle, _UP_S, f"SLURM does not come up, see {self.lab.folder}", ASK_S)

    @property
    def is_idle(self) -> bool:
        """All nodes are up, and no job runs."""
        done = self.lab.run(["sinfo", "--noheader", "--Node", "--format=%t"], env=self.environ())
        return done.stdout.split() == ["idle"] * len(self.lab.nodes)

    def _daemon(self, command: Sequence[str]) -> None:
        name = next(word for word in command if word in _PROGRAMS)
        with open(self.lab.folder / f"{name}.log", "ab") as log:
            # They outlive a test's body, and must not outlive a test run that is killed.
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**own_environ(), "PATH": _PATH},
            )
        self._daemons.append(daemon)

    def _write_files(self) -> None:
        self._munge.mkdir(mode=0o755)
        key = self._munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        state = self.lab.folder / "slurm"
        for name in ("state", "cgroup", *(node.name for node in self.lab.nodes)):
            (state / name).mkdir(parents=True)
        values = {"munge": self._munge, "state": state, "address": LAB_ADDRESS, "tree_width": self._tree_width}
        self.conf.write_text(_CONF.format(**values, nodes=self._nodes()))
        (self.lab.folder / "cgroup.conf").write_text(_CGROUP_CONF.format(state=state))
        for index in range(GPUS):  # SLURM only looks whether they are devices: they are /dev/null.
            os.mknod(self.lab.folder / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.lab.folder / "gres.conf").write_text(f"Name=gpu File={self.lab.folder}/gpu[0-{GPUS - 1}]\n")

    def _nodes(self) -> str:
        has = f"CPUs={CPUS} Gres=gpu:{GPUS}"
        return "\n".join(f"NodeName={node.name} NodeAddr={node.address} {has}" for node in self.lab.nodes)


@dataclass(frozen=True)
class Batch:
    """A job of sbatch."""

    slurm: Slurm
    id: str
    log: Path

    def field(self, name: str) -> str:
        """What SLURM tells of it under this name."""
        match = re.search(rf"(?<!\S){name}=(\S*)", self.slurm.run("scontrol", "show", "job", self.id))
        assert match
        return match[1]

    def update(self, *fields: str) -> None:
        """Have SLURM change it."""
        self.slurm.run("scontrol", "update", f"JobId={self.id}", *fields)

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Wait until its log has ``count`` such texts."""
        wait_until(lambda: len(re.findall(pattern, self.text)) >= count, TIMEOUT_S, f"{pattern!r} is not in {self.log}")

    def wait_in(self, state: str) -> None:
        """Wait until it is in this state."""
        what = f"job {self.id} does not get {state}"
        wait_until(lambda: self.field("JobState") == state, TIMEOUT_S, what, ASK_S)

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def _is_ours(line: str) -> bool:
    return bool(re.match(r"(\S*/)?(slurmd|slurmstepd)\b", line))


_CONF = Path(__file__).with_name("slurm.conf").read_text()

_CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupAutomount=yes
CgroupMountpoint={state}/cgroup
"""
