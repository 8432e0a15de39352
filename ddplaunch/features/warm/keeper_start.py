"""Starts the process of a keeper, which then outlives this one. Runs in an agent, and where many jobs are started."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.warm import surroundings
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT

if TYPE_CHECKING:
    from ddplaunch.features.warm.records import KeeperSpec
    from ddplaunch.system.limits import Limits

KEEPER_MODULE = "ddplaunch.features.warm.keeper"
"""Started by its name: the agent must not import the package. A test checks that the module exists."""

_START = f"""\
{IMPORT_PACKAGE}; from {KEEPER_MODULE} import caught, finished, main, script; main(search_path)()
with finished, caught:
    script()()"""


def start(record: KeeperSpec, env: dict[str, str], open_files: Limits) -> int:
    """Start a keeper with this environment and these limits of open files, and return its pid. Raises OSError."""
    environ_fd = surroundings.environ_file(env)
    record = replace(record, environ=surroundings.digests(env), environ_fd=environ_fd)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _START, PACKAGE_ROOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=surroundings.visible(env),
        pass_fds=(environ_fd,),
        start_new_session=True,
    )
    assert process.stdin
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, open_files)  # It reads its limits after its first record.
    with process.stdin:
        process.stdin.write(wire.encode(record))
    process.returncode = 0  # It outlives this process: no warning about a child that has not been waited for.
    return process.pid
