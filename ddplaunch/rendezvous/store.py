"""Serves a c10d TCPStore: the workers' store of one attempt in a separate process, or the store of the rendezvous.

The process of the workers' store is started by the forkserver, and killed by the agent at the end of the attempt.
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from ddplaunch.system import linux, signals
from ddplaunch.system.limits import raise_open_files

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def serve(listen_fd: int) -> None:
    """Serve on a listening socket until killed.

    The socket listens before any worker starts: a worker that connects while this process imports torch waits in the
    kernel's queue.
    """
    signals.leave_to_agent()
    try:
        store = open_store(listen_fd)
    except RuntimeError as error:  # No thread can be started: the limit of processes is reached.
        sys.exit(f"it cannot be served: {str(error).partition(chr(10))[0]}")
    while store:
        signal.pause()


def open_store(listen_fd: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serve a store on a listening socket; it ends with the process. ``timeout`` is for calls of the returned client.

    ``master_listen_fd`` keeps the store on one address; without it torch listens on every interface.

    Raises:
        RuntimeError: the store cannot be served; the message is torch's.
    """
    from torch.distributed import TCPStore

    # Each client takes an open file; many systems have a soft limit of 1,024 and a far higher hard limit.
    raise_open_files()
    linux.ignore_name_servers()
    listener = socket.socket(fileno=listen_fd)
    address, port = listener.getsockname()[:2]
    listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd)
