"""Serves the workers' c10d TCPStore of one attempt.

Runs in a process that the forkserver starts and the agent kills at the end of the attempt.
"""

from __future__ import annotations

import signal
import socket

from ddplaunch.system.limits import raise_open_files


def serve(listen_fd: int) -> None:
    """Serve on a listening socket until killed.

    The socket listens before any worker starts: a worker that connects while this process imports torch waits in the
    kernel's queue. ``master_listen_fd`` keeps the store on one address; without it torch listens on every interface.
    """
    # Ctrl-C must not interrupt the store before the workers have exited.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from torch.distributed import TCPStore

    # Each client takes an open file; many systems have a soft limit of 1,024 and a far higher hard limit.
    raise_open_files()
    listener = socket.socket(fileno=listen_fd)
    address, port = listener.getsockname()[:2]
    listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    while store:
        signal.pause()
