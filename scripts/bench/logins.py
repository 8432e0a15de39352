"""Threads, CPU time and memory of the part of the launcher that starts agents on thousands of hosts over SSH.

Needs root, and runs the launcher's part as a user without rights, with `ulimit -u 512`. All hosts are one sshd, under
many names. Logins and connections are real; in place of the agents, one process connects for all of them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from common import size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from ddplaunch.cluster.hosts import Host  # noqa: E402
from ddplaunch.config import RemoteConfig  # noqa: E402
from ddplaunch.features.remote import relay, remote_start  # noqa: E402
from ddplaunch.features.ssh.connections import Connections  # noqa: E402
from ddplaunch.system import limits  # noqa: E402
from ddplaunch.transport.failures import HostFailure  # noqa: E402
from ddplaunch.transport.handle import NodeFacts  # noqa: E402
from ddplaunch.version import __version__  # noqa: E402
from tests.support.connecting import echo_start, handle, listener_of  # noqa: E402
from tests.support.nodes import LAB_ADDRESS, Keys, Lab, NodeOptions  # noqa: E402

HOSTS = size("BENCH_NODES", 2000, 4)
MAX_PROCESSES = 512
NOBODY = 65534

LOGIN = """#!/bin/sh
IFS= read -r start
IFS= read -r given
name=${{given##*'"name": "'}}
mkfifo {fifo}-"${{name%%\\"*}}"
printf '%s\\n' "$given" > {fifo}
read end < {fifo}-"${{name%%\\"*}}"
printf '\\n%s{{"has_connected": true}}\\n' '{prefix}'
cat >/dev/null
"""
"""What a login executes: a host's agent has connected."""


def agents(fifo: str) -> None:
    """Connect as the agent of each host that has been logged in to, until this process is killed."""
    limits.raise_open_files(2 * HOSTS + 100, "hosts")
    facts = json.dumps({"pid": 7, "python": "3.11.0", "ddplaunch": __version__, "torch": "2"})
    kept = []
    with open(fifo, "rb+", 0) as logins, open(logins.fileno(), closefd=False) as lines:
        for line in lines:
            given = json.loads(line)
            kept += [relay._connect(LAB_ADDRESS, given, kind) for kind in (relay.ERRORS, relay.RECORDS)]
            kept[-1].sendall(remote_start.FACTS_PREFIX + facts.encode() + b"\n")
            os.close(os.open(f"{fifo}-{given['name']}", os.O_WRONLY))  # Waits until the login reads.


def launch(ssh_config: str) -> None:
    """Connect to all hosts, and print what that has cost."""
    limits.raise_open_files(2 * HOSTS + 400, "hosts")
    me, most, is_over = psutil.Process(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], me.num_threads())

    threading.Thread(target=look, daemon=True).start()
    began = time.perf_counter()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    connections = Connections(RemoteConfig(config=ssh_config))
    listener = listener_of(connections)
    handles = [handle(Host(f"h{n}"), echo_start(), connections, events.put, listener) for n in range(HOSTS)]
    settled = [events.get() for _ in handles]
    wall_s, cpu, memory = time.perf_counter() - began, me.cpu_times(), me.memory_info()
    is_over.set()
    failed = [event for event in settled if isinstance(event, HostFailure)]
    connected = sum(isinstance(event, NodeFacts) for event in settled)
    if failed or connected != HOSTS:
        sys.exit(f"{len(failed)} of {HOSTS} failed: {failed[:1]}")
    own_ms = 1000 * (cpu.user + cpu.system) / HOSTS
    print(f"| {HOSTS} | {most[0]} | {wall_s:.0f} s | {own_ms:.1f} ms | {memory.rss / 2**20:.0f} MB |", flush=True)
    os._exit(0)


def main() -> None:
    """Print a line of a table."""
    print(
        "| hosts | most threads | until all agents are connected | CPU for each | memory |\n|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        fifo, login, keys = folder / "logins", folder / "login", Keys(folder)
        os.mkfifo(fifo)
        login.write_text(LOGIN.format(fifo=fifo, prefix=remote_start.FACTS_PREFIX.decode()))
        login.chmod(0o755)
        options = NodeOptions(max_startups="1000", sshd=(f"ForceCommand {login}",))
        with Lab(folder / "lab", keys, 1, node1=options) as lab:
            os.chown(keys.client, NOBODY, NOBODY)
            text = lab.config_of(lab["node1"], "h*")
            lab.ssh_config.write_text(text)
            own = [sys.executable, __file__]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
            limited = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            # It may read the files of this checkout, which may lie in root's home.
            limited += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
            limited += ["prlimit", f"--nproc={MAX_PROCESSES}"]
            inside = ["ip", "netns", "exec", lab["node1"].netns]
            with subprocess.Popen([*inside, *own, "agents", str(fifo)], env=env) as acting:
                try:
                    done = lab.run([*limited, *own, "launch", str(lab.ssh_config)], env=env)
                finally:
                    acting.kill()
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {done.stderr}")
    print(done.stdout)


if __name__ == "__main__":
    {"agents": agents, "launch": launch}[sys.argv[1]](sys.argv[2]) if len(sys.argv) == 3 else main()
