"""SSH's row of the transports. Imported at each start of the command."""

from ddplaunch.rows import TransportRow

TRANSPORTS = (
    TransportRow(
        name="ssh",
        code="ddplaunch.features.ssh.handle:SshTransport",
        way="over SSH",
        keeps_warm=True,
        login="ssh HOST",
        takes_logins=True,
    ),
)
