"""Virtual machines with a real sshd each: network, UTS, PID and mount namespaces around it, on one bridge.

The bridge lives in a network namespace of its own, the ``lab``, in which the launcher under test runs too: no address
of these networks ever appears in the machine's own. Nothing of the machine's /etc or /run is touched either; what sshd
reads there is mounted over in the node's own mount namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import slow_link
from tests.support.processes import children, command_line, is_alive, wait_until
from tests.support.slow_link import without_offload

PREFIX = "ddpl"
LAB_ADDRESS = "10.99.0.1"
_NOBODY = "10.99.0.77"
_TEST_MARK = "DDPLAUNCH_TEST_MARK"
_CLONE_NEWNET = 0x40000000

_INIT = """
hostname "$1" && mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount -t tmpfs tmpfs /dev/shm &&
mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/passwd" /etc/passwd &&
exec "$3" -D -e -f "$2/sshd_config"
"""

_LAUNCHER = 'hostname lab && mount --bind "$0" /etc/hosts && exec "$@"'


def why_not() -> str:
    """Why there can be no nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "virtual nodes need root"
    missing = [
        name for name in ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd") if not _which(name)
    ]
    return f"virtual nodes need {', '.join(missing)}" if missing else ""


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


@dataclass(frozen=True)
class NodeOptions:
    """How a node differs from a plain one.

    Attributes:
        shell: login shell of its only user, root.
        home: files of the home folder, by name.
        resolves: its own host name is in its /etc/hosts.
        sshd: more lines for its sshd_config.
    """

    shell: str = "/bin/bash"
    home: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[int] = (22,)
    max_startups: str = "100"
    resolves: bool = True
    sshd: Sequence[str] = ()


class Keys:
    """The client's key and a host key per node, each made once per session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.client = self.make("client")

    def make(self, name: str) -> Path:
        """The private key of that name; its public half is next to it, with the ending .pub."""
        path = self._folder / name
        if not path.exists():
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)])
        return path

    def public(self, name: str) -> str:
        """Type and text of a public key."""
        return " ".join(Path(f"{self.make(name)}.pub").read_text().split()[:2])


class Node:
    """One virtual machine."""

    def __init__(self, lab: Lab, index: int, options: NodeOptions) -> None:
        self.name = lab.names.format(index)
        self.address = f"10.99.{1 + index // 250}.{index % 250}"
        self.folder = lab.folder / self.name
        self.options = options
        self._lab = lab
        self._index = index
        self.netns = f"{lab.netns}-{self.name}"
        self.link = f"v{index}"
        self.data_link = f"d{index}"
        self._process: subprocess.Popen[bytes] | None = None
        self._slow: subprocess.Popen[bytes] | None = None

    @property
    def mac(self) -> str:
        return f"02:00:00:00:{self._index // 256:02x}:{self._index % 256:02x}"

    @property
    def log(self) -> str:
        """What its sshd has written."""
        return (self.folder / "sshd.log").read_text()

    @property
    def init_pid(self) -> int:
        """Process 1 of the node, as the machine sees it."""
        assert self._process
        return wait_until(lambda: children(self._process.pid) if self._process else [])[0]

    def pids(self) -> dict[int, str]:
        """Command lines of what runs on the node, but its sshd."""
        return {pid: line for pid, line in self._all_pids() if not line.startswith(_sshd_lines())}

    def sshd_pids(self) -> list[int]:
        """Its sshd: process 1, and those of each login."""
        return [pid for pid, line in self._all_pids() if line.startswith(_sshd_lines())]

    def _all_pids(self) -> Iterator[tuple[int, str]]:
        if self._process:
            for pid in _processes_of(os.readlink(f"/proc/{self.init_pid}/ns/pid")):
                yield pid, command_line(pid)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the node, with all its namespaces."""
        enter = ["nsenter", "--target", str(self.init_pid), "--all", *command]
        return subprocess.run(enter, check=True, text=True, capture_output=True, **options)

    def crash(self, silently: bool = False) -> None:
        """Kill every process of the node at once; silently, like a loss of power, no other machine hears of it."""
        if silently:
            self.unplug()
        if self._process:
            os.kill(self.init_pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def unplug(self) -> None:
        """Cut the network; addresses stay resolved, so that packets vanish instead of being refused."""
        self._lab.ip(f"link set {self.link} down")

    def replug(self) -> None:
        """Undo ``unplug``."""
        self._lab.ip(f"link set {self.link} up")

    def cut_data_link(self) -> None:
        """Cut the second network, of ``Lab.add_data_network``, as a broken switch does: packets vanish."""
        self._lab.ip(f"link set {self.data_link} down")

    def slow_down(self, delay_s: float, bits_per_s: float = 1e9) -> None:
        """Make its link slow, both ways; connections that are open stay so."""
        self.full_speed()
        with _inside(self.netns):
            without_offload("eth0")
        command = [sys.executable, slow_link.__file__, self.link, f"t{self._index}", str(delay_s), str(bits_per_s)]
        self._slow = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *_in_netns(self._lab.netns), *command],
            stdout=subprocess.PIPE,
            env=own_environ(),
        )
        assert self._slow.stdout
        if self._slow.stdout.readline() != b"ready\n":
            raise RuntimeError("the slow link did not start")

    def silence_dns(self) -> None:
        """Give it a name server that never answers: packets to that address vanish, as behind a firewall."""
        self.run(["ip", "neigh", "replace", _NOBODY, "lladdr", "02:00:00:02:00:00", "dev", "eth0", "nud", "permanent"])
        (self.folder / "resolv.conf").write_text(f"nameserver {_NOBODY}\n")
        self.run(["mount", "--bind", str(self.folder / "resolv.conf"), "/etc/resolv.conf"])

    def full_speed(self) -> None:
        """Undo ``slow_down``."""
        if self._slow:
            with self._slow:
                self._slow.kill()
            self._slow = None
            self._lab.ip(f"link set {self.link} master br0")

    def start(self) -> None:
        """Boot: sshd is process 1. Also after a crash."""
        sshd = _which("sshd")
        node = ["unshare", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        command = [*_in_netns(self.netns), *node, "sh", "-c", _INIT, "sh", self.name, str(self.folder), str(sshd)]
        with open(self.folder / "sshd.log", "wb") as log:
            # The death signal is for a test run that is killed itself.
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=own_environ(),
            )

    def wait(self) -> None:
        """Wait until sshd listens."""
        last = f"Server listening on 0.0.0.0 port {self.options.ports[-1]}"
        wait_until(lambda: last in self.log or (self._process and self._process.poll() is not None))
        if last not in self.log:
            raise RuntimeError(f"{self.name} did not start:\n{self.log}")

    def write_files(self, keys: Keys, hosts: str) -> None:
        """All that its sshd and its user read."""
        home = self.folder / "home"
        home.mkdir(parents=True)
        for name, text in self.options.home.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        lines = Path("/etc/passwd").read_text().splitlines()
        users = [line for line in lines if not line.startswith("root:")]
        root = f"root:x:0:0:root:{home}:{self.options.shell}"
        (self.folder / "passwd").write_text("\n".join([root, *users, ""]))
        own = "" if self.options.resolves else f"{self.address} {self.name}\n"
        (self.folder / "hosts").write_text(hosts.replace(own, "") if own else hosts)
        (self.folder / "authorized_keys").write_text(keys.public("client") + "\n")
        (self.folder / "sshd_config").write_text(self._sshd_config(keys.make(self.name)))

    def _sshd_config(self, host_key: Path) -> str:
        options = self.options
        return "\n".join(
            [
                *options.sshd,
                *(f"Port {port}" for port in options.ports),
                "ListenAddress 0.0.0.0",
                f"HostKey {host_key}",
                f"AuthorizedKeysFile {self.folder}/authorized_keys",
                f"MaxStartups {options.max_startups}",
                "PidFile none",
                "StrictModes no",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                "UseDNS no",
                "PrintMotd no",
                "PrintLastLog no",
                "",
            ]
        )


class Lab:
    """Some nodes and a place for the launcher, on one network.

    Attributes:
        prefix: command that runs another one in the lab; it becomes that command, with its pid.
        ssh_config: for ``ssh -F``: reaches every node by its name.
        known_hosts: the file that ``ssh_config`` names, with the keys of all nodes.
    """

    def __init__(self, folder: Path, keys: Keys, count: int, names: str = "node{}", **special: NodeOptions) -> None:
        """``names`` makes names of numbers; ``special`` has options by node1, ..., and for others under ``default``."""
        self.folder = folder
        self.names = names
        self.keys = keys
        self.netns = f"{PREFIX}{secrets.token_hex(4)}"
        plain = special.get("default", NodeOptions())
        self.nodes = [Node(self, n, special.get(f"node{n}", plain)) for n in range(1, count + 1)]
        self.ssh_config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self._hosts = folder / "hosts"
        self.prefix = [*_in_netns(self.netns), "unshare", "--uts", "--mount", "sh", "-c", _LAUNCHER, str(self._hosts)]

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def __enter__(self) -> Lab:
        remove_stale()
        self._use = socket.socket(socket.AF_UNIX)
        self._use.bind(_sign_of_use(self.netns))
        try:
            self._write_files()
            self._make_network()
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in it and take its networks down."""
        for node in self.nodes:
            if node._slow:
                with node._slow:
                    node._slow.kill()
            if node._process:
                node.crash()
        _remove([self.netns, *(node.netns for node in self.nodes)])
        self._use.close()

    def ip(self, *commands: str) -> None:
        """Run commands of ip(8) in the lab's network namespace."""
        _batch(["-n", self.netns], commands)

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the lab to its end."""
        return subprocess.run([*self.prefix, *map(str, command)], text=True, capture_output=True, **options)

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in the lab."""
        return subprocess.Popen([*self.prefix, *map(str, command)], **options)

    def add_data_network(self) -> None:
        """Give each node a second interface, eth1 with the address 10.98.0.NUMBER, on a bridge of its own."""
        self.ip("link add br1 type bridge mcast_snooping 0", "link set br1 up")
        for number, node in enumerate(self.nodes, 1):
            self.ip(
                f"link add {node.data_link} type veth peer name eth1 netns {node.netns}",
                f"link set {node.data_link} master br1 up",
            )
            _batch(["-n", node.netns], [f"addr add 10.98.0.{number}/16 dev eth1", "link set eth1 up"])

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and all it starts meanwhile, sees the lab's network (but the machine's own /etc/hosts)."""
        with _inside(self.netns):
            yield

    def leftovers(self) -> dict[str, dict[int, str]]:
        """What runs on nodes, but sshd, by node name."""
        return {node.name: pids for node in self.nodes if node._process and (pids := node.pids())}

    def _write_files(self) -> None:
        names = "".join(f"{node.address} {node.name}\n" for node in self.nodes)
        # The second spares every client of a TCPStore on loopback a look-up in the DNS.
        hosts = f"127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n::1 localhost\n{LAB_ADDRESS} lab\n{names}"
        for node in self.nodes:
            node.write_files(self.keys, hosts)
        self._hosts.write_text(hosts)
        known = (f"{node.name},{node.address} {self.keys.public(node.name)}\n" for node in self.nodes)
        self.known_hosts.write_text("".join(known))
        self.ssh_config.write_text("".join(map(self.config_of, self.nodes)))

    def config_of(self, node: Node, name: str = "", port: int = 0) -> str:
        """The part of an ssh_config that reaches a node by its name, or by another name and port."""
        lines = [
            f"Host {name or node.name}",
            f"HostName {node.address}",
            f"HostKeyAlias {node.name}",
            f"Port {port or node.options.ports[0]}",
            "User root",
            f"IdentityFile {self.keys.client}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile /dev/null",
            "StrictHostKeyChecking yes",
        ]
        return "\n  ".join(lines) + "\n"

    def _make_network(self) -> None:
        _batch([], [f"netns add {name}" for name in (self.netns, *(node.netns for node in self.nodes))])
        commands = ["link set lo up", "link add br0 address 02:00:00:01:00:00 type bridge mcast_snooping 0"]
        commands += [f"addr add {LAB_ADDRESS}/16 dev br0", "link set br0 up"]
        for node in self.nodes:
            commands.append(f"link add {node.link} type veth peer name eth0 address {node.mac} netns {node.netns}")
            commands.append(f"link set {node.link} master br0 up")
            commands.append(_neighbour(node.address, node.mac, "br0"))
        self.ip(*commands)
        # An address that cannot be resolved any more is refused within 3 s; behind a router packets would vanish.
        neighbours = [_neighbour(LAB_ADDRESS, "02:00:00:01:00:00", "eth0")]
        neighbours += [_neighbour(node.address, node.mac, "eth0") for node in self.nodes]
        for node in self.nodes:
            own = ["link set lo up", f"addr add {node.address}/16 dev eth0", "link set eth0 up"]
            _batch(["-n", node.netns], own + [line for line in neighbours if node.mac not in line])


@contextlib.contextmanager
def _inside(netns: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{netns}") as other:
        enter(other.fileno())
        try:
            yield
        finally:
            enter(own.fileno())


def own_environ() -> dict[str, str]:
    """Without the mark that a test's processes carry: these outlive a test's body, and are ended with their lab."""
    return {name: value for name, value in os.environ.items() if name != _TEST_MARK}


def _neighbour(address: str, mac: str, device: str) -> str:
    return f"neigh replace {address} lladdr {mac} dev {device} nud permanent"


def _in_netns(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done


def _batch(options: Sequence[str], commands: Sequence[str]) -> None:
    _run(["ip", *options, "-batch", "-"], input="\n".join(commands) + "\n")


def _processes_of(namespace: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace and is_alive(int(entry)):
                    yield int(entry)


def _sshd_lines() -> tuple[str, str]:
    """How the command lines of sshd begin."""
    return "sshd:", str(_which("sshd"))


def _remove(names: Sequence[str]) -> None:
    for name in names:
        if os.path.exists(f"/run/netns/{name}"):
            for pid in _run(["ip", "netns", "pids", name]).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run(["ip", "netns", "del", name])


def _sign_of_use(name: str) -> str:
    """An abstract address that a lab's process holds: it is gone with that process, and known in all PID namespaces."""
    return f"\0{name}"


def _is_in_use(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(_sign_of_use(name))
        except OSError:
            return True
    return False


def remove_stale(prefix: str = PREFIX) -> None:
    """Take down what test runs left that were killed themselves. Other test runs may do so at the same time."""
    pattern = re.compile(rf"{prefix}[0-9a-f]{{8}}(?=-|$)")
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/run/netns"):
            if (match := pattern.match(name)) and not _is_in_use(match[0]):
                try:
                    _remove([name])
                except RuntimeError:
                    if os.path.exists(f"/run/netns/{name}"):
                        raise
