"""AgentListener: where the launcher listens for agents that were started over SSH, so that their logins can end.

Runs in the launcher. A login takes a thread of paramiko as long as it is open: hundreds of hosts would need hundreds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddplaunch.features.remote.call_back import CallBackHandle, CallBackServer, chosen_address
from ddplaunch.system import network

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.remote.io_thread import IoThread

HINT = (
    "To let them connect, let the nodes through this machine's firewall, to any port, or select a network by which "
    "they reach it: --local-addr, --interface."
)


class AgentListener:
    """The listener, and what the nodes need to connect to it. Main thread.

    Attributes:
        has_told: the user knows of a node that stays connected over SSH.
        some_cannot_connect: a node has told that it cannot. Until one can, no other node tries: where a firewall drops
            what they send, each ``MAX_STARTS`` of them would wait for 3 s.
    """

    def __init__(self, io: IoThread, config: LaunchConfig) -> None:
        """Listen. Without an address of the user's the nodes use the one from which their logins come.

        Raises:
            LaunchError: no port is free.
        """
        address = chosen_address(config)
        listener = network.listen("the launcher", network.bindable(address) if address else network.any_address(), 0)
        from ddplaunch.features.remote import tls

        identity, certificate = new_identity()
        self.has_told = self.some_cannot_connect = False
        self._io, self._server = io, CallBackServer(io, listener, tls.server_context(identity))
        self._given = {
            "addresses": [address] if address else [],
            "port": self._server.port,
            "secret": self._server.secret,
            "certificate": certificate,
        }

    def given(self, name: str) -> bytes:
        """The line behind ``first_input`` for the node with this name; the rest of stdin is the agent's. Any thread."""
        in_vain = self.some_cannot_connect and not self._server.has_let_in
        return json.dumps({**self._given, "name": name, "in_vain": in_vain}).encode() + b"\n"

    def expect(self, name: str, handle: CallBackHandle) -> None:
        """The node with this name may connect for ``handle``, once."""
        self._io.call(lambda: self._server.expect(name, handle))

    def close(self) -> None:
        """Listen no more, when the IoThread has ended."""
        self._server.close()


def new_identity() -> tuple[bytes, str]:
    """A private key and its certificate for one run, as PEM; and the certificate alone."""
    from datetime import datetime, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ddplaunch")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        # It lives as long as the run; the clocks of nodes may be wrong by years.
        .not_valid_before(datetime(1970, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=timezone.utc))
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + pem, pem.decode()
