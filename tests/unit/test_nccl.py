"""NCCL's network: what its lines tell, and which interfaces it must not use. The lines: data/nccl_logs.txt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddplaunch.errors import Level
from ddplaunch.features.health.records import NodeHardware, NodeHealth
from ddplaunch.features.nccl import variables
from ddplaunch.features.nccl.interfaces import choice
from ddplaunch.features.nccl.launcher import NcclNetwork
from ddplaunch.features.nccl.log import RankNetwork, active, summary, warnings
from ddplaunch.protocol.launcher_agent import Output
from tests.support import golden

LOGS = (Path(__file__).parent / "data" / "nccl_logs.txt").read_text()


def rank(lines: str, host: str = "node1") -> RankNetwork:
    told = RankNetwork(host)
    for line in lines.splitlines():
        told.read(line.encode().decode("unicode_escape"))
    return told


SAMPLES = {name: lines for name, lines in re.findall(r"##### (.*)\n((?:.+\n?)*)", LOGS)}


def test_what_the_lines_of_each_version_tell() -> None:
    def page(name: str) -> str:
        told = rank(SAMPLES[name])
        if not told.network:
            return "nothing"
        ports = {"node1": active(["InfiniBand 400 Gb/s"] * int((re.findall(r"(\d+) ports", name) or ["0"])[0]))}
        return "\n".join([summary({0: told}), *(f"warning: {text}" for text in warnings({0: told}, ports))])

    golden.check("nccl", {name: page(name) for name in SAMPLES})


def test_ranks_that_use_other_networks_are_named() -> None:
    ib, slow = rank(SAMPLES["2.28.3 with InfiniBand (4 ports)"]), rank(SAMPLES["2.4.7 without InfiniBand"], "node2")
    told = {0: ib, 1: ib, 2: slow}
    assert summary(told) == (
        "NCCL 2.28.3+cuda13.0, 2.4.7+cuda10.0 uses ranks 0-1: IB (mlx5_0, mlx5_1, mlx5_2, mlx5_3); "
        "rank 2: sockets (ens3)"
    )
    assert list(warnings(told, {"node2": active(["InfiniBand 200 Gb/s"])})) == [
        "node2: 1 InfiniBand port is active, NCCL uses sockets (ens3): NET/IB : No device found",
        "some ranks use sockets and others another network: NCCL cannot connect them, or is slow",
    ]


class Run:
    """Stands for the run: what is posted is called at once."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.messages = self.nodes = self
        self.all = [self, self]
        self.host = "node1"

    def show(self, text: str, level: int, kind: str = "message") -> None:
        assert level == Level.NORMAL
        self.shown.append(text)

    def post(self, function) -> None:
        function()


@pytest.mark.parametrize("hides", [True, False])
def test_the_network_is_told_once_when_all_ranks_have_told_it(hides: bool) -> None:
    run, written = Run(), []
    watch = NcclNetwork(run, hides=hides)  # type: ignore[arg-type]
    watch.on_nodes_ready({"node1": 2})
    watch.on_event(0, NodeHealth(hardware=NodeHardware(ports=("InfiniBand 400 Gb/s", "Ethernet 25 Gb/s"))))
    write = watch.on_output(lambda header, data: written.append((header.nbytes, data)))
    lines = SAMPLES["2.27.7, no access to the devices in a container (4 ports)"]
    for number in (0, 1):
        assert not run.shown
        data = f"epoch 1\n{lines}node1:61:99 [0] NCCL WARN trouble\nloss 2\n".encode()
        header = Output(host="node1", rank=number, local_rank=number, stream="stdout", nbytes=len(data))
        write(header, data)
        assert written[-1][0] == len(written[-1][1])
        kept = b"epoch 1\nnode1:61:99 [0] NCCL WARN trouble\nloss 2\n"
        assert written[-1][1] == (kept if hides else data)
    assert run.shown == [
        "NCCL 2.27.7+cuda12.9 uses sockets (eth0, virbr0)",
        "warning: node1: 1 InfiniBand port is active, NCCL uses sockets (eth0, virbr0): "
        "Failed to open libibverbs.so[.1]",
    ]
    write(replaced(header, attempt=1), lines.encode())
    assert len(run.shown) == 2


def replaced(header: Output, attempt: int) -> Output:
    from dataclasses import replace

    return replace(header, attempt=attempt)


@pytest.mark.parametrize(
    ("given", "environ", "set_"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"NCCL_DEBUG": "WARN"}, True),
        (True, {"NCCL_DEBUG": "info"}, False),
    ],
)
def test_nccl_is_asked_to_tell_its_choice_only_with_the_option(
    given: bool, environ: dict[str, str], set_: bool
) -> None:
    assert bool(variables({"nccl_report": given}, environ, to_hosts=False)) is set_


# Interfaces.


def interface(root: Path, name: str, kind: str = "", *files: str, ports: tuple[str, ...] = ()) -> None:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    (folder / "uevent").write_text(f"DEVTYPE={kind}\nINTERFACE={name}\n" if kind else f"INTERFACE={name}\n")
    for file in files:
        (folder / file).mkdir()
    for port in ports:
        (folder / "brif" / port).mkdir(parents=True)


@pytest.fixture
def machine(tmp_path: Path) -> str:
    for name in ("eth0", "eth1", "ib0"):
        interface(tmp_path, name, "", "device")
    interface(tmp_path, "lo")
    interface(tmp_path, "docker0", "bridge", ports=("veth1",))
    interface(tmp_path, "virbr0", "bridge", ports=("tap0",))
    interface(tmp_path, "br0", "bridge", ports=("eth1",))
    interface(tmp_path, "br1", "bridge", ports=("bond0",))
    interface(tmp_path, "bond0", "bond")
    interface(tmp_path, "tap0", "", "tun_flags")
    interface(tmp_path, "tun0", "", "tun_flags")
    interface(tmp_path, "wg0", "wireguard")
    interface(tmp_path, "flannel.1", "vxlan")
    interface(tmp_path, "veth1")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("names", "own", "chosen"),
    [
        ("eth0 eth1 lo docker0", "eth0", ""),  # NCCL leaves these out by itself.
        ("eth0 eth1 lo docker0 virbr0 tun0 wg0 flannel.1 veth1", "eth0", "eth0 eth1"),
        ("br0 br1 bond0 eth0", "br0", ""),  # Bridges with a way out.
        ("br0 eth0 virbr0", "br0", "br0 eth0"),
        ("eth0 tun0", "tun0", ""),  # The nodes reach each other by the VPN.
        ("virbr0 wg0 eth0", "wg0", "wg0 eth0"),
        ("eth0 ib0 virbr0", "eth0", ""),  # Then NCCL uses InfiniBand's alone.
    ],
)
def test_interfaces_that_lead_to_no_other_node_are_left_out(names: str, own: str, chosen: str, machine: str) -> None:
    used, wrong = choice({name: ["10.0.0.1"] for name in names.split()}, {own}, machine)
    assert (used if wrong else []) == chosen.split()


CABLE = ["169.254.3.1", "fe80::1%usb0"]


@pytest.mark.parametrize(
    ("addresses", "leading", "chosen"),
    [
        ({"eth0": ["10.0.0.1", "fe80::2"], "usb0": CABLE}, {"eth0"}, "eth0"),  # A management controller.
        ({"eth0": ["fe80::2"], "eth1": ["fe80::3"]}, {"eth0"}, ""),  # There is nothing better.
        ({"eth0": ["10.0.0.1"], "tun0": ["10.8.0.1"], "wg0": ["10.9.0.1"]}, {"eth0", "tun0"}, "eth0 tun0"),
    ],
)
def test_addresses_of_one_cable_and_a_second_way_to_the_other_nodes(
    addresses: dict[str, list[str]], leading: set[str], chosen: str, machine: str
) -> None:
    used, wrong = choice(addresses, leading, machine)
    assert (used if wrong else []) == chosen.split()
