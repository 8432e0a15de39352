"""``many_clients.py N``: so many clients connect to a store whose process may have only half as many files open."""

import os
import resource
import signal
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from ddplaunch.rendezvous import store

count = int(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
listener = socket.create_server(("127.0.0.1", 0), backlog=count)
port = listener.getsockname()[1]
server = os.fork()
if server == 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count // 2, hard))
    store.serve(listener.detach())
try:
    options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=20)}
    clients = [TCPStore("127.0.0.1", port, **options) for _ in range(count)]
    print(clients[0].add("key", 1), clients[-1].add("key", 1))
finally:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
