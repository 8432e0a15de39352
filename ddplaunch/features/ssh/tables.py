"""SSH's row of the transports. Imported at each start of the command."""

from ddplaunch.rows import TransportRow

TRANSPORTS = (
    TransportRow(
        name="ssh",
        class_path="ddplaunch.features.ssh.handle:SshTransport",
        way="over SSH",
        keeps_warm=True,
        login_command="ssh HOST",
        takes_logins=True,
    ),
)
