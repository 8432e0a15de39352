"""Tells the nodes that wait for this one that it does not come: it has failed before it could join them.

Runs in the agent, when the run on this node has ended. torch may be what has failed: a process without it speaks to the
other nodes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.launcher_channel import LauncherLost
from ddplaunch.agent.parts import NodeServices
from ddplaunch.agent.rendezvous import TELL_S
from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.protocol.launcher_agent import AgentFailed, Notice, StopWorkers
from ddplaunch.protocol.rendezvous import NodeCannotJoin
from ddplaunch.system.signals import SignalReceived
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.mailbox import Mailbox
    from ddplaunch.protocol.specs import AgentSpec

TELLER_MODULE = "ddplaunch.rendezvous.tell_without_torch"
"""Started by its name: the agent must not import the rendezvous package. A test checks that the module exists."""

_POLL_S = 0.1
_MAX_REASON = 1000


def tell(spec: AgentSpec, failed: AgentFailed, mailbox: Mailbox[object], send: Callable[[object], None]) -> None:
    """Tell them until they have heard it, for up to ``TELL_S``; whatever would stop this agent ends it. Does not raise.

    Does nothing if this node has ``failed`` to meet them, or if none waits for this one until it has lost patience: a
    launcher that leads all nodes learns it by AgentFailed, and where a node may be missing, another one may still come.
    """
    config = spec.rendezvous
    if config is None or spec.one_launcher_leads or not 1 < config.min_nodes == config.max_nodes:
        return
    if failed.exit_code == RENDEZVOUS:
        return
    node = NodeServices()
    node.spec = spec
    with contextlib.suppress(LaunchError, OSError):  # Then there is nobody to tell, or no process to do it.
        client = RendezvousClient(node, config)
        reason = quote(failed.message.partition("\n")[0], _MAX_REASON)
        send(Notice(f"{reason}; telling the other nodes that {spec.host} does not come, for up to {TELL_S:.0f} s"))
        cannot_join = NodeCannotJoin(config.node_index or 0, f"{spec.host} does not come: {reason}", failed.exit_code)
        _run(client, wire.encode(client.member_spec()) + wire.encode(cannot_join), mailbox)


def _run(client: RendezvousClient, records: bytes, mailbox: Mailbox[object]) -> None:
    text = f"{IMPORT_PACKAGE}; from {TELLER_MODULE} import main; main()"
    fds = [client.endpoint_socket.fileno()] if client.endpoint_socket else []
    command, deadline = [sys.executable, "-c", text, PACKAGE_ROOT, *map(str, fds)], time.monotonic() + TELL_S
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=fds)
    try:
        if process.stdin:
            with process.stdin as stream:
                stream.write(records)
        while process.poll() is None and time.monotonic() < deadline:
            if isinstance(mailbox.get(time.monotonic() + _POLL_S), (StopWorkers, SignalReceived, LauncherLost)):
                break
    finally:
        process.kill()
        process.wait()
        client.close()
