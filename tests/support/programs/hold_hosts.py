"""Connects to hosts with echo agents and waits for a line on stdin: ``hold_hosts.py SSH_CONFIG HOST...``."""

import queue
import sys
import threading

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import RemoteConfig
from ddplaunch.features.ssh.connections import Connections
from ddplaunch.features.ssh.handle import SshHandle
from ddplaunch.transport.handle import AgentConnected
from tests.support.connecting import echo_start

events = queue.SimpleQueue()
connections = Connections(RemoteConfig(config=sys.argv[1]))
handles = [SshHandle(Host(name), echo_start(), connections, events.put, lambda *_: None) for name in sys.argv[2:]]


def tell():
    connected = 0
    while connected < len(handles):
        connected += isinstance(events.get(), AgentConnected)
    print("connected", flush=True)


threading.Thread(target=tell, daemon=True).start()
sys.stdin.readline()
