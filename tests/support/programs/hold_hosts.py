"""Connects to hosts with echo agents and waits for a line on stdin: ``hold_hosts.py SSH_CONFIG WAY HOST...``.

WAY is ``connects``, if the agents are to connect to it, or ``stays``.
"""

import queue
import sys
import threading

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import RemoteConfig
from ddplaunch.features.ssh.connections import Connections
from ddplaunch.transport.handle import NodeFacts
from tests.support.connecting import echo_start, handle, listener_of

events = queue.SimpleQueue()
connections = Connections(RemoteConfig(config=sys.argv[1]))
listener = listener_of(connections) if sys.argv[2] == "connects" else None
handles = [handle(Host(name), echo_start(), connections, events.put, listener) for name in sys.argv[3:]]


def tell():
    connected = 0
    while connected < len(handles):
        connected += isinstance(events.get(), NodeFacts)
    print("connected", flush=True)


threading.Thread(target=tell, daemon=True).start()
sys.stdin.readline()
