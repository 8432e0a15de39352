"""Tells the other nodes that this one does not come, although torch cannot be used here.

The agent starts this process when its node has failed before it could join. It imports no torch. It writes into the
rendezvous store, or answers at the endpoint if this node should serve it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

from ddplaunch.protocol import wire
from ddplaunch.protocol.rendezvous import MemberSpec, NodeRefused
from ddplaunch.rendezvous.boxes import send_to_coordinator
from ddplaunch.rendezvous.connect import JoinRefused, verified
from ddplaunch.rendezvous.plain_store import PlainStore, RunRefused, absence_at, offer
from ddplaunch.rendezvous.store import Signer, absence_key, key_prefix, open_key

_PAUSE_S = 0.2


def main() -> None:
    """Read a MemberSpec and a NodeRefused from stdin, and tell it until the others have heard it.

    The argument is the descriptor of the endpoint's socket, on the node that serves it. The agent ends this
    process after a while: another node may still import torch, or come late.
    """
    received = [wire.read_record(sys.stdin.buffer, (kind,)) for kind in (MemberSpec, NodeRefused)]
    if None in received:
        return
    spec, refused = (each[0] for each in received if each)
    settings = spec.rendezvous
    if settings.is_server:
        text = Signer(settings.secret).sign(absence_key(spec), wire.encode(refused).decode("ascii").rstrip())
        offer(socket.socket(fileno=int(sys.argv[1])), text, settings.min_nodes - 1)
        return
    endpoints = [(a, port) for port in (settings.port, *settings.other_ports) for a in settings.server_addresses]
    with contextlib.suppress(JoinRefused, RunRefused, RuntimeError):  # Then nobody waits for this node.
        while not any(_told(spec, refused, *endpoint) for endpoint in endpoints):
            time.sleep(_PAUSE_S)


def _told(spec: MemberSpec, refused: NodeRefused, address: str, port: int) -> bool:
    """Whether the rendezvous is open there, and has got ``refused``.

    Raises:
        JoinRefused, RunRefused, RuntimeError: it is not that of this node, or the node that serves it does not come.
    """
    with contextlib.suppress(OSError), PlainStore(address, port) as store:
        if store.check(open_key(spec)):
            signer = verified(spec, Signer(spec.rendezvous.secret), store.get(open_key(spec)))
            send_to_coordinator(store, signer, key_prefix(spec), refused)
            return True
    absence_at(spec, address, port)
    return False
