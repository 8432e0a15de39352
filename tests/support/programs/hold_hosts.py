"""Connects to hosts with echo agents and waits for a line on stdin: ``hold_hosts.py SSH_CONFIG calls|stays HOST...``.

With ``calls``, the agents connect to it.
"""

import queue
import sys
import threading

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import RemoteConfig
from ddplaunch.features.ssh.connections import Connections
from ddplaunch.transport.handle import AgentConnected
from tests.support.connecting import calls_of, echo_start, handle

events = queue.SimpleQueue()
connections = Connections(RemoteConfig(config=sys.argv[1]))
calls = calls_of(connections) if sys.argv[2] == "calls" else None
handles = [handle(Host(name), echo_start(), connections, events.put, calls) for name in sys.argv[3:]]


def tell():
    connected = 0
    while connected < len(handles):
        connected += isinstance(events.get(), AgentConnected)
    print("connected", flush=True)


threading.Thread(target=tell, daemon=True).start()
sys.stdin.readline()
