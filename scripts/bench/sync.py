"""How long --sync takes before a run, with many hosts: everything, nothing, or one of 1,000 files is new; needs root.

Then code of ``MEGABYTES`` is sent through an uplink of the launcher of ``UPLINK_MBIT``, once as usual, where
hosts that have the code give it to others, and once by the launcher alone.

The hosts are network namespaces with a real sshd each, from ``tests/support/nodes.py``, and a home of their own. All
hosts share this machine: the agents that they start cause nearly all of the time. So there is a base: the same number
of agents that are only asked what runs on their host, by ``--ps``.
"""

from __future__ import annotations

import os
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
MEGABYTES, UPLINK_MBIT = size("BENCH_MEGABYTES", 50, 1), size("BENCH_UPLINK_MBIT", 100, 100)
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
choice.at_start(config)
print(time.monotonic() - started)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Lab(Path(name) / "lab", Keys(Path(name)), HOSTS) as lab:
        script, logs = make_repository(Path(name) / "project"), f"{name}/logs"
        names = [node.name for node in lab.nodes]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": name}

        def send(spread_above: int = 32) -> float:
            command = [*lab.prefix, sys.executable, "-c", _SEND, logs, str(lab.ssh_config), str(spread_above), *names]
            done = subprocess.run(command, cwd=script.parent, env=env, check=True, capture_output=True)
            return float(done.stdout)

        def ask() -> float:
            started = time.monotonic()
            command = [*lab.prefix, *DDPLAUNCH, "--ps", "--hosts", ",".join(names), "--ssh-config", str(lab.ssh_config)]
            subprocess.run(command, env=env, check=True, capture_output=True)
            return time.monotonic() - started

        time.sleep(0 if IS_SMALLEST else 2.5)  # A file that was changed just now is read again.
        rows = [("--ps", ask()), (f"first --sync, {FILES} files", send())]
        for number in range(REPEATS):
            rows.append(("--ps", ask()))
            rows.append(("--sync, nothing has changed", send()))
            (script.parent / "package_0/module_0.py").write_text(f"NUMBER = {number}")
            rows.append(("--sync, one file has changed", send()))
        uplink = f"qdisc replace dev br0 root tbf rate {UPLINK_MBIT}mbit burst 256kb latency 100ms"
        lab.run(["tc", *uplink.split()], check=True)
        for how, spread_above in (("from host to host", 1 if IS_SMALLEST else 32), ("by the launcher alone", 1 << 20)):
            (script.parent / "large.bin").write_bytes(os.urandom(MEGABYTES << 20))
            rows.append((f"{MEGABYTES} MB over {UPLINK_MBIT} Mbit/s, {how}", send(spread_above)))
    for what, elapsed in rows:
        print(f"{HOSTS} hosts: {what}: {elapsed:.2f} s")


if __name__ == "__main__":
    main()
