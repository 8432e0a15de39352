"""Connects to hosts with echo agents and waits for a line on stdin: ``hold_hosts.py SSH_CONFIG HOST...``."""

import queue
import sys
import threading

from ddplaunch.hosts import Host
from ddplaunch.launcher.handles import AgentConnected
from ddplaunch.launcher.ssh import SshHandle
from ddplaunch.launcher.ssh_config import SshSettings
from ddplaunch.launcher.ssh_connections import Connections
from tests.support.connecting import echo_start

events = queue.SimpleQueue()
connections = Connections(SshSettings(config=sys.argv[1]))
handles = [SshHandle(Host(name), echo_start(), connections, events.put, lambda *_: None) for name in sys.argv[2:]]


def tell():
    connected = 0
    while connected < len(handles):
        connected += isinstance(events.get(), AgentConnected)
    print("connected", flush=True)


threading.Thread(target=tell, daemon=True).start()
sys.stdin.readline()
