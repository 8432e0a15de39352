"""A name server that does not answer delays no start, and the user learns what to do about it.

torch looks up the name of the peer of a connection and waits for the answer, by default 10 s and more, at every start.
"""

from __future__ import annotations

import socket

SLOW_S = 0.5
"""A look-up of an address that takes longer delays every start."""


def reverse_name(address: str) -> str:
    """Name of an address, from /etc/hosts or a name server; empty if it has none. Blocks while no server answers."""
    try:
        # Not getnameinfo: up to Python 3.11.3 no other thread of the process runs while it waits.
        return socket.gethostbyaddr(_mapped(address))[0]
    except OSError:
        return ""


def advice(address: str, name: str) -> str:
    """Which line avoids the look-up of ``address``, one of a host called ``name``."""
    is_loopback = address.startswith("127.") or address == "::1"
    return f"add the line `{_mapped(address)} {'localhost' if is_loopback else name}` to /etc/hosts"


def _mapped(address: str) -> str:
    """``address`` as torch looks it up: IPv4 in IPv6."""
    return address if ":" in address else f"::ffff:{address}"
