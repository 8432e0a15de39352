"""What --sync adds to a run on many hosts: everything, nothing, or one of 1,000 files is new; needs root.

Then code of ``MEGABYTES`` that cannot be compressed is sent through an uplink of the launcher of ``UPLINK_MBIT``: once
as usual, where hosts that have the code give it to others, and once by the launcher alone.

The hosts are network namespaces with a real sshd each, from ``tests/support/nodes.py``, and a home of their own. All of
them share this machine, and what runs on them takes nearly all of the time: so there is a base, the same run without
--sync, and the CPU time of the launcher alone is printed, too. torch is a stub, because its import on all hosts would
take a minute of this machine.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import DDPLAUNCH, IS_SMALLEST, REPEATS, size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from snapshot import FILES, make_repository  # noqa: E402

from tests.support.nodes import Keys, Lab  # noqa: E402

HOSTS = size("BENCH_NODES", 64, 2)
MEGABYTES, UPLINK_MBIT = size("BENCH_MEGABYTES", 8, 1), size("BENCH_UPLINK_MBIT", 100, 100)
_SEND = """
import sys, time
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, RemoteConfig
from ddplaunch.features.snapshot import choice, hosts as sending
logs, ssh_config, spread_above, *names = sys.argv[1:]
sending._SPREAD_ABOVE = int(spread_above)
started = time.monotonic()
remote, output, hosts = RemoteConfig(config=ssh_config), OutputConfig(log_dir=logs), tuple(map(Host, names))
config = LaunchConfig(script="train.py", sync=True, hosts=hosts, max_nodes=len(hosts), remote=remote, output=output)
choice.at_start(config).begun.close()
print(time.monotonic() - started)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Lab(Path(name) / "lab", Keys(Path(name)), HOSTS) as lab:
        script, logs = make_repository(Path(name) / "project"), f"{name}/logs"
        names = [node.name for node in lab.nodes]
        path = f"{ROOT}:{ROOT / 'tests/support/stubs'}"
        env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": name, "OMP_NUM_THREADS": "1"}
        hosts = ("--hosts", ",".join(names), "--ssh-config", str(lab.ssh_config))

        def run(*options: str) -> tuple[float, float]:
            """Wall time, and CPU time of the launcher."""
            started, before = time.monotonic(), _cpu_s()
            command = [
                *lab.prefix,
                *DDPLAUNCH,
                *hosts,
                "--log-dir",
                logs,
                "--nproc-per-node",
                "1",
                *options,
                "train.py",
            ]
            subprocess.run(command, cwd=script.parent, env=env, check=True, capture_output=True)
            return time.monotonic() - started, _cpu_s() - before

        def change(number: int) -> None:
            (script.parent / "package_0/module_0.py").write_text(f"NUMBER = {number}")

        def send(spread_above: int) -> float:
            command = [*lab.prefix, sys.executable, "-c", _SEND, logs, str(lab.ssh_config), str(spread_above), *names]
            done = subprocess.run(command, cwd=script.parent, env=env, check=True, capture_output=True)
            return float(done.stdout)

        time.sleep(0 if IS_SMALLEST else 2.5)  # A file that was changed just now is read again.
        rows: dict[str, list[tuple[float, float]]] = {f"first --sync, {FILES} files": [run("--sync")]}
        for number in range(REPEATS):
            rows.setdefault("no --sync", []).append(run())
            rows.setdefault("--sync, nothing has changed", []).append(run("--sync"))
            change(number)
            rows.setdefault("--sync, one file has changed", []).append(run("--sync"))
        for what, times in rows.items():
            wall, cpu = map(statistics.median, zip(*times, strict=True))
            print(f"{HOSTS} hosts: a run, {what}: {wall:.2f} s, of which the launcher computes {cpu:.2f} s", flush=True)
        uplink = f"qdisc replace dev br0 root tbf rate {UPLINK_MBIT}mbit burst 256kb latency 100ms"
        lab.run(["tc", *uplink.split()], check=True)
        for how, spread_above in (("from host to host", 1 if IS_SMALLEST else 32), ("by the launcher alone", 1 << 20)):
            (script.parent / "large.bin").write_bytes(os.urandom(MEGABYTES << 20))
            took_s = send(spread_above)
            print(f"{HOSTS} hosts: {MEGABYTES} MB over {UPLINK_MBIT} Mbit/s, {how}: {took_s:.2f} s", flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
