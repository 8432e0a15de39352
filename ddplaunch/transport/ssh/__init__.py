"""The transport over SSH: configuration, keys, known hosts, connections, jump hosts, and the agent's channel.

Runs in the launcher's process, with one thread for each connection. The only package that imports paramiko; it is
imported only where hosts are reached over SSH. Without paramiko its import raises LaunchError.
"""

import sys
from importlib.util import find_spec

from ddplaunch.errors import LaunchError

if find_spec("paramiko") is None:
    raise LaunchError(
        "hosts are reached over SSH with the Python package paramiko, which is not installed",
        f"Run `{sys.executable} -m pip install paramiko`; a run without --hosts does not need it.",
    )
