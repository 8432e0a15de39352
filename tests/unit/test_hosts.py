"""Hosts are named as users, DeepSpeed and Open MPI write them, and what cannot be meant is told, never guessed.

The tables of DeepSpeed's own ``tests/unit/launcher/test_run.py`` are kept, but for three things: a hostfile's host
needs no slots, a bare host on several lines is PBS's way to count them, and excluding everything is an error.
"""

from __future__ import annotations

import contextlib
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.cluster.host_filter import resolve, select
from ddplaunch.cluster.hostfile import parse_hostfile, read_hostfile
from ddplaunch.cluster.hostlist import MAX_HOSTS, expand, fold
from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST, Host, display_names, parse_hosts
from ddplaunch.errors import USAGE, UsageError
from tests.support import texts


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [str(host) for host in hosts]


def hosts_of(**slots: int | None) -> tuple[Host, ...]:
    return tuple(Host(name.replace("_", "-"), slots=count) for name, count in slots.items())


# --hosts.


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", [Host("gpu1")]),
        (" gpu1 , gpu2 ", [Host("gpu1"), Host("gpu2")]),
        ("admin@gpu5:2222", [Host("gpu5", "admin", 2222)]),
        ("gpu6:slots=4", [Host("gpu6", slots=4)]),
        ("me@gpu6:22:slots=4", [Host("gpu6", "me", 22, 4)]),
        ("[fd00::1]", [Host("fd00::1")]),
        ("me@[fd00::1]:22:slots=2", [Host("fd00::1", "me", 22, 2)]),
        ("[fe80::1%eth0]", [Host("fe80::1%eth0")]),
        ("[::ffff:10.0.0.1]", [Host("::ffff:10.0.0.1")]),
        ("10.0.0.1", [Host("10.0.0.1")]),
        ("My_alias-2.example.com.", [Host("My_alias-2.example.com.")]),
        ("first.last+x@gpu1", [Host("gpu1", "first.last+x")]),
        # Two sshds on one machine are two nodes.
        ("localhost:2201,localhost:2202", [Host("localhost", port=2201), Host("localhost", port=2202)]),
    ],
)
def test_a_host_is_a_name_with_a_user_a_port_and_slots(text: str, hosts: list[Host]):
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu[2-4]", "gpu2 gpu3 gpu4"),
        ("gpu1,gpu[2-4],gpu9", "gpu1 gpu2 gpu3 gpu4 gpu9"),
        ("gpu[3,1]", "gpu3 gpu1"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[08-11]", "gpu08 gpu09 gpu10 gpu11"),
        ("gpu[99-101]", "gpu99 gpu100 gpu101"),
        ("gpu[09-100,1]", [*(f"gpu{n:02}" for n in range(9, 101)), "gpu1"]),
        ("gpu[0-0]", "gpu0"),
        ("node[01-03,07]a[1-2]", "node01a1 node01a2 node02a1 node02a2 node03a1 node03a2 node07a1 node07a2"),
        ("[1-2][1-2]", "11 12 21 22"),
        ("[1,2]", "1 2"),
        ("gpu[1-2].example.com:2222", "gpu1.example.com:2222 gpu2.example.com:2222"),
        ("me@gpu[1, 3 ]:slots=2", "me@gpu1 me@gpu3"),
        ("10.0.0.[9-11]", "10.0.0.9 10.0.0.10 10.0.0.11"),
    ],
)
def test_brackets_are_numbers_in_the_users_order_padded_as_the_first(text: str, expected: str | list[str]):
    assert names(parse_hosts(text)) == (expected.split() if isinstance(expected, str) else expected)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "names no host", "gpu1,gpu"),
        ("  ", "names no host", "gpu1,gpu"),
        ("gpu1,,gpu2", "between two commas", "gpu1,gpu"),
        ("gpu1,", "between two commas", "gpu1,gpu"),
        ("gpu1 gpu2", "' ' cannot be in a host name", "gpu1,gpu"),
        ("@gpu1", "no user name", ""),
        ("me@", "no host name", ""),
        ("me@:22", "no host name", ""),
        ("a@b@c", "'@' cannot be in a host name", ""),
        ("gpu1:ssh", "only :PORT and :slots=N", ""),
        ("gpu1:", "only :PORT and :slots=N", ""),
        ("gpu1:slots=4:22", "only :PORT and :slots=N", ""),
        ("gpu1:0x16", "only :PORT and :slots=N", ""),
        ("gpu1:٢٢", "only :PORT and :slots=N", ""),
        ("gpu1:65536", "port must be between 1 and 65535", ""),
        ("gpu1:slots=0", f"slots must be between 1 and {MAX_SLOTS_PER_HOST}", ""),
        ("gpu1:slots=99999", f"slots must be between 1 and {MAX_SLOTS_PER_HOST}", ""),
        # Open MPI's and horovod's slots.
        ("gpu1:4,gpu2:4", "4 looks like slots", ":slots=4"),
        ("fd00::1", "IPv6 address without brackets", "[fd00::1]:22"),
        ("me@fd00::1:22", "IPv6 address without brackets", "[fd00::1:22]"),
        ("[fd00::zz]", "not an IPv6 address", ""),
        ("[fd00::1%-x;]", "not an IPv6 address", ""),
        ("10.0.0.[254-256]", "10.0.0.256 is not an IPv4 address", "255"),
        ("10.0.0.[01-04]", "10.0.0.01 is not an IPv4 address", "leading zeros"),
        (".hidden", "start with a dot", ""),
        ("..", "start with a dot", ""),
        ("x" * 254, "longer than a host name", ""),
        ("gpu[1-2", "brackets hold", ""),
        ("gpu1-2]", "brackets hold", ""),
        ("gpu[]", "brackets hold", ""),
        ("gpu[1-2,]", "brackets hold", ""),
        ("gpu[a-c]", "brackets hold", ""),
        ("gpu[1-5/2]", "brackets hold", ""),
        ("gpu[[1-2]]", "brackets hold", ""),
        ("gpu[-1]", "brackets hold", ""),
        ("gpu[" + "9" * 5000 + "]", "brackets hold", ""),
        ("gpu[4-2]", "[4-2] runs backwards", ""),
        ("gpu[1-03]", "padded with zeros to one length", ""),
        ("gpu[001-03]", "padded with zeros to one length", ""),
        ("gpu1,gpu2,gpu1", "names gpu1 twice", "gpu1:slots=N"),
        ("gpu[1-3],gpu2", "names gpu2 twice", ""),
        ("gpu1,me@GPU1:22", "one host twice, as gpu1 and me@GPU1:22", ""),
        ("[fd00::1],[fd00:0::1]", "one host twice", ""),
    ],
)
def test_what_is_not_a_list_of_hosts_is_told(text: str, message: str, hint: str):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse_hosts(text)
    assert caught.value.message.startswith("--hosts")
    assert hint in caught.value.hint
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("character", [*" \t\n\r\0\x1b\x7f\"'`$\\;&|<>(){}*?!#~^%=/", "ä", "٣", "\u2028", "\udcff"])
def test_nothing_that_a_shell_or_a_terminal_could_act_on_is_part_of_a_name(character: str):
    for text in (f"gpu{character}1", f"me{character}x@gpu1"):
        with pytest.raises(UsageError, match="cannot be in a") as caught:
            parse_hosts(text)
        assert caught.value.message.isprintable()


@pytest.mark.parametrize("text", ["-oProxyCommand=id", "-l@gpu1", "me@-oProxyCommand", "me@-x:22", "-[1-2]"])
def test_nothing_that_ssh_could_read_as_an_option_is_part_of_a_name(text: str):
    with pytest.raises(UsageError, match="must not start with a dash"):
        parse_hosts(text)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "-x"},
        {"name": ""},
        {"name": "a b"},
        {"name": "gpu1\n"},
        {"name": "fd00::1%e;x"},
        {"user": "-x"},
        {"user": ""},
        {"port": 0},
        {"slots": 0},
        {"devices": ()},
        {"devices": ("0;id",)},
    ],
)
def test_no_host_can_be_made_in_any_other_way_either(values: dict):
    with pytest.raises(UsageError):
        Host(**{"name": "gpu1", **values})


@pytest.mark.parametrize(
    "text",
    [
        "gpu[0-999999999999999]",
        "gpu[0-100000]",
        "gpu[0-999]x[0-999]",
        "[0-9][0-9][0-9][0-9][0-9][0-9]",
        "x" + "[0-9]" * 5000,
        ",".join(f"{letter}[0-49999]" for letter in "abc"),
    ],
)
def test_a_mistyped_range_is_an_error_and_takes_no_memory(text: str):
    with pytest.raises(UsageError, match=f"more than {MAX_HOSTS:,} hosts|longer than a host name"):
        parse_hosts(text)


def test_a_host_is_shown_as_it_would_be_written():
    written = ["gpu1", "admin@gpu5:2222", "[fd00::1]:22", "[fe80::1%eth0]", "me@10.0.0.1"]
    assert names(parse_hosts(",".join(written))) == written


# Folding.


@pytest.mark.parametrize(
    ("given_names", "text"),
    [
        ("", ""),
        ("gpu1", "gpu1"),
        ("login", "login"),
        ("gpu1 gpu2", "gpu[1-2]"),
        ("gpu11 gpu03 gpu04 gpu05 gpu06 gpu07", "gpu[03-07,11]"),
        ("gpu10 gpu9 gpu8 gpu2", "gpu[2,8-10]"),
        ("gpu099 gpu100 gpu101", "gpu[099-101]"),
        ("gpu1 gpu01", "gpu[01,1]"),
        ("gpu2 gpu2", "gpu2"),
        ("login gpu2 gpu1 cpu10 cpu9", "cpu[9-10],gpu[1-2],login"),
        ("n1a1 n1a2 n2a1 n2a2", "n[1-2]a[1-2]"),
        ("n1a1 n2a2", "n1a1,n2a2"),
        ("n1a1 n1a2 n2a1", "n1a[1-2],n2a1"),
        ("r1n1.c5 r1n2.c5", "r1n[1-2].c5"),
        ("10.0.0.9 10.0.0.10 10.0.1.9 10.0.1.10", "10.0.[0-1].[9-10]"),
        ("u1@gpu1:2201 u1@gpu2:2201 u2@gpu1:2201", "u1@gpu[1-2]:2201,u2@gpu1:2201"),
        ("fd00::1 fd00::2", "[fd00::1],[fd00::2]"),
        ("[fd00::1]:22 [fd00::1]:23", "[fd00::1]:22,[fd00::1]:23"),
        ("x1234567890123456 x1234567890123457", "x1234567890123456,x1234567890123457"),
    ],
)
def test_many_names_are_told_in_few_words_in_natural_order(given_names: str, text: str):
    assert fold(given_names.split()) == text


NAMES = st.builds(
    "".join,
    st.lists(st.sampled_from(["gpu", "n", "-", ".c", "0", "1", "2", "8", "9", "10", "09", "99", "100"]), max_size=5),
).filter(lambda name: name and name[0] not in "-." and not re.fullmatch(r"\d+(\.\d+){3}", name))


@given(st.lists(NAMES, min_size=1, max_size=40))
@example(["n1a1", "n1a2", "n2a2"])
def test_what_was_folded_can_be_read_as_hosts_again(many: list[str]):
    text = fold(many)
    assert sorted(names(parse_hosts(text))) == sorted(set(many))
    assert fold(names(parse_hosts(text))) == text


WRITTEN = st.builds(
    lambda user, name, port: f"{user}{name}{port}",
    st.sampled_from(["", "me@", "u2@"]),
    NAMES | st.sampled_from(["[fd00::1]", "[fd00::2]", "10.0.0.1", "10.0.0.2"]),
    st.sampled_from(["", ":2201", ":2202"]),
)


@given(st.lists(WRITTEN, min_size=1, max_size=20))
def test_hosts_with_users_and_ports_are_read_again_too(many: list[str]):
    unique = {parse_hosts(text)[0].machine: text for text in many}.values()
    assert sorted(names(parse_hosts(fold(unique)))) == sorted(unique)


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=3))
def test_expanding_is_what_nested_loops_do(groups: list[tuple[int, int, int]]):
    first_last_width = [(first, first + more, width) for first, more, width in groups]
    pattern = "".join(f"x[{first:0{width}}-{last:0{width}}]" for first, last, width in first_last_width)
    counts = [[f"x{n:0{width}}" for n in range(first, last + 1)] for first, last, width in first_last_width]
    assert list(expand(pattern)) == ["".join(pieces) for pieces in product(*counts)]


@given(st.lists(st.text(texts.ENCODABLE)))
def test_any_texts_can_be_folded(many: list[str]):
    fold(many)


# Hostfiles.

DEEPSPEED = """
    worker-1 slots=2
    worker-2 slots=2

    localhost slots=1
    123.23.12.10 slots=2

    #worker-1 slots=3
    # this is a comment

"""

OPEN_MPI = """\
# Comments begin with #
aa slots=8
bb slots = 4 max_slots=6   # and may follow
cc slots=2 max-slots=2
dd max_slots=2

node15
admin@node16
node17 slots=3 username=me port=2222
"""

OURS = "\ufeffgpu[1-2] slots=8\r\n\r\nadmin@gpu5:2222\tslots=4\r\n[fd00::1]:22 slots=2\r\ngpu6:slots=4\r\n  gpu7"

PBS = "node07\nnode07\nnode03\nnode07\nnode03\nnode01\n"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (DEEPSPEED, (*hosts_of(worker_1=2, worker_2=2, localhost=1), Host("123.23.12.10", slots=2))),
        (
            OPEN_MPI,
            (
                *hosts_of(aa=8, bb=4, cc=2, dd=2, node15=None),
                Host("node16", "admin"),
                Host("node17", "me", 2222, 3),
            ),
        ),
        (
            OURS,
            (
                *hosts_of(gpu1=8, gpu2=8),
                Host("gpu5", "admin", 2222, 4),
                Host("fd00::1", None, 22, 2),
                *hosts_of(gpu6=4, gpu7=None),
            ),
        ),
        (PBS, hosts_of(node07=3, node03=2, node01=1)),
        ("gpu1 slots=4\ngpu2\ngpu2\n", hosts_of(gpu1=4, gpu2=2)),
        ("gpu1\rgpu2", hosts_of(gpu1=None, gpu2=None)),
        ("gpu1 port=4", (Host("gpu1", port=4),)),
    ],
    ids=["deepspeed", "open-mpi", "ours", "pbs", "mixed", "old-mac", "low-port"],
)
def test_hostfiles_of_others_work_as_they_are(text: str, hosts: tuple[Host, ...]):
    assert parse_hostfile(text, "nodes") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nodes: names no host"),
        ("# nothing\n\n", "nodes: names no host"),
        ("gpu1\nthis is bad slots=1", "nodes:2: this: is is not a valid setting"),
        ("gpu1 4", "nodes:1: gpu1: 4 is not a valid setting"),
        ("gpu1 slots", "nodes:1: gpu1: slots is not a valid setting"),
        ("gpu1 slots=", "nodes:1: gpu1: slots= is not a valid setting"),
        ("gpu1 slots=four", "nodes:1: gpu1: slots=four is not a valid setting"),
        ("gpu1 slots=-1", "nodes:1: gpu1: slots=-1 is not a valid setting"),
        ("gpu1 slots=٤", "is not a valid setting"),
        ("gpu1 slots=" + "9" * 5000, "is not a valid setting"),
        ("gpu1 sockets=2", "nodes:1: gpu1: sockets=2 is not a valid setting"),
        ("gpu1 slots=0", "nodes:1: gpu1: slots must be between"),
        ("gpu1 slots=2 slots=2", "nodes:1: gpu1: slots is set twice"),
        ("gpu1:slots=2 slots=2", "nodes:1: gpu1:slots=2: slots is set twice"),
        ("a@gpu1 username=b", "nodes:1: a@gpu1: user is set twice"),
        ("gpu1 username=-l", "must not start with a dash"),
        ("gpu1 slots=4 max_slots=2", "nodes:1: gpu1: slots=4 is more than max_slots=2"),
        ("gpu1:4", "nodes:1: gpu1:4: the number after the colon is ssh's port"),
        ("gpu1,gpu2", "nodes:1: gpu1,gpu2: a line names one host"),
        ("\n\n-oProxyCommand=x", "nodes:3: -oProxyCommand=x: a host name must not start with a dash"),
        ("^gpu1", "nodes:1: ^gpu1: '^' cannot be in a host name"),
        ("worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1", "nodes:3: worker-1 is on line 1 already"),
        ("gpu1 slots=2\ngpu1 slots=2", "nodes:2: gpu1 is on line 1 already"),
        ("gpu1\ngpu1\ngpu1 slots=2", "nodes:3: gpu1 is on line 1 already"),
        ("gpu1\nme@GPU1", "nodes:2: me@GPU1 is on line 1 already"),
        ("gpu[1,1]", "nodes:1: gpu1 is on line 1 already"),
        ("gpu[0-49999]\nx[0-50000]\n", f"nodes:2: more than {MAX_HOSTS:,} hosts"),
        ("gpu1\n" * (MAX_SLOTS_PER_HOST + 1), "nodes: gpu1 has 4,097 lines"),
        ("gpu1\n" * 1_000_001, "nodes:1000001: more than 1,000,000 slots"),
        ("x" * 100_000, "nodes:1: a line of 100,000 characters"),
    ],
)
def test_a_line_that_means_nothing_is_told_with_file_and_line(text: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse_hostfile(text, "nodes")
    assert caught.value.message.startswith("nodes:")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"gpu1\n\xff\xfe\n", "nodes:2: not text in UTF-8"),
        ("gpu1\n".encode("utf-16"), "nodes:1: not text in UTF-8"),
        (b"# " + b"x" * (16 << 20), "nodes: larger than 16 MiB"),
        (b"\x7fELF\0\0", "nodes:1: "),
    ],
)
def test_a_file_that_is_no_hostfile_is_told(data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_bytes(data)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_hostfile("nodes")
    assert caught.value.message.isprintable()


def test_a_hostfile_that_cannot_be_read_is_told(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no hostfile no-such-file") as caught:
        read_hostfile("no-such-file")
    assert "was started in" in caught.value.hint
    with pytest.raises(UsageError, match=r"cannot read the hostfile .*: Is a directory"):
        read_hostfile(str(tmp_path))
    with pytest.raises(UsageError, match=r"null (byte|character)"):
        read_hostfile("a\0b")


# --include and --exclude.


def chosen(hosts: tuple[Host, ...], include: str | None = None, exclude: str | None = None) -> dict:
    return {str(host): host.devices and ",".join(host.devices) for host in select(hosts, include, exclude)}


ONE = hosts_of(worker_0=4)
TWO = hosts_of(worker_0=4, worker_1=4)


@pytest.mark.parametrize(
    ("hosts", "include", "exclude", "left"),
    [
        (TWO, None, None, {"worker-0": None, "worker-1": None}),
        (ONE, None, "worker-0:1", {"worker-0": "0,2,3"}),
        (ONE, None, "worker-0:1,2", {"worker-0": "0,3"}),
        (ONE, "worker-0:1", None, {"worker-0": "1"}),
        (ONE, "worker-0:1,1", None, {"worker-0": "1"}),
        (ONE, "worker-0:1@worker-0:0,1", None, {"worker-0": "0,1"}),
        (ONE, "worker-0", None, {"worker-0": None}),
        (TWO, "worker-1:0,3", None, {"worker-1": "0,3"}),
        (TWO, None, "worker-1", {"worker-0": None}),
        (TWO, None, "worker-0:0,1@worker-1:3", {"worker-0": "2,3", "worker-1": "0,1,2"}),
        (TWO, "worker-0@worker-1:0,2", None, {"worker-0": None, "worker-1": "0,2"}),
        (TWO, None, "worker-0:0,1,2,3", {"worker-1": None}),
        # Beyond DeepSpeed: the user's order, ranges, capitals, hosts without slots, UUIDs, IPv6.
        (TWO, "worker-1@worker-0:3,0", None, {"worker-0": "0,3", "worker-1": None}),
        (TWO, "worker-[0-1]:02", None, {"worker-0": "2", "worker-1": "2"}),
        (TWO, None, "Worker-1", {"worker-0": None}),
        (hosts_of(gpu1=None), "gpu1:10,9", None, {"gpu1": "9,10"}),
        (hosts_of(gpu1=None), "gpu1:GPU-ab12,0", None, {"gpu1": "0,GPU-ab12"}),
        (parse_hosts("me@[fd00::1]:2222"), "[fd00:0::1]:0", None, {"me@[fd00::1]:2222": "0"}),
    ],
)
def test_deepspeeds_filters_leave_what_deepspeed_leaves(
    hosts: tuple[Host, ...], include: str | None, exclude: str | None, left: dict
):
    assert chosen(hosts, include, exclude) == left
    assert list(chosen(hosts, include, exclude)) == list(left)


def test_a_host_has_as_many_slots_as_devices_if_it_had_slots():
    assert [host.slots for host in select(TWO, "worker-0:1,2@worker-1", None)] == [2, 4]
    assert [host.slots for host in select(hosts_of(gpu1=None), "gpu1:1,2", None)] == [None]


@pytest.mark.parametrize(
    ("hosts", "include", "exclude", "message", "hint"),
    [
        (TWO, "A", "B", "--include and --exclude exclude each other", ""),
        (TWO, "jeff", None, "--include jeff: jeff is not one of the hosts", "The hosts are worker-[0-1]."),
        (TWO, None, "worker0", "--exclude worker0: worker0 is not one of the hosts", "Did you mean worker-"),
        (parse_hosts("gpu1.example.com"), "gpu1", None, "gpu1 is not one", "Did you mean gpu1.example.com?"),
        (parse_hosts("admin@gpu5"), "admin@gpu5:0", None, "admin is not one", "admin is a user"),
        (TWO, "worker-1:4", None, "--include: worker-1 has no device 4, only 0,1,2,3", ""),
        (TWO, None, "worker-1:4", "--exclude: worker-1 has no device 4", ""),
        (TWO, None, "worker-1:GPU-ab12", "--exclude: worker-1 has no device GPU-ab12", ""),
        (TWO, None, "worker-1@worker-0:1@5", "5 is not one of the hosts", ""),
        (TWO, None, "worker-[0-1]", "excludes all hosts", ""),
        (TWO, None, "worker-0:0,1,2,3@worker-1", "excludes all hosts", ""),
        (TWO, "worker-0@worker-0:1", None, "once with devices and once without", ""),
        (TWO, "", None, "--include : no host name", ""),
        (TWO, "worker-0@", None, "no host name", ""),
        (TWO, "worker-0:", None, "not HOST or HOST:DEVICE", "gpu1@gpu2:0,2"),
        (TWO, "worker-0:a", None, "not HOST or HOST:DEVICE", ""),
        (TWO, "worker-0:0-2", None, "not HOST or HOST:DEVICE", ""),
        (TWO, "worker-0:2222", None, "not HOST or HOST:DEVICE", ""),
        (TWO, "worker-0,worker-1", None, "',' cannot be in a host name", "gpu1@gpu2:0,2"),
        (TWO, "worker-[0-99999999]", None, "more than 100,000 hosts", ""),
        (hosts_of(gpu1=None), None, "gpu1:0", "the devices of gpu1 are not known", "slots=8"),
        (parse_hosts("a:2201,a:2202"), "a:0", None, "a matches a:2201,a:2202", ""),
    ],
)
def test_a_filter_that_cannot_be_meant_is_told(
    hosts: tuple[Host, ...], include: str | None, exclude: str | None, message: str, hint: str
):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        select(hosts, include, exclude)
    assert hint in caught.value.hint


# Where hosts are named.


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Hostfiles that name ``file1`` and ``file2``."""
    paths = tmp_path / "one", tmp_path / "two"
    for number, path in enumerate(paths, 1):
        path.write_text(f"file{number}\n")
    return str(paths[0]), str(paths[1])


def test_an_option_wins_over_the_environment(files: tuple[str, str]):
    one, two = files
    assert names(resolve({}, None, None)) == []
    assert names(resolve({"DDPLAUNCH_HOSTS": "", "DDPLAUNCH_HOSTFILE": ""}, None, None)) == []
    assert names(resolve({"DDPLAUNCH_HOSTS": "env"}, None, None)) == ["env"]
    assert names(resolve({"DDPLAUNCH_HOSTFILE": one}, None, None)) == ["file1"]
    for environ in ({"DDPLAUNCH_HOSTS": "env"}, {"DDPLAUNCH_HOSTFILE": one}, {"DDPLAUNCH_HOSTS": "!;bad"}):
        assert names(resolve(environ, "option", None)) == ["option"]
        assert names(resolve(environ, None, two)) == ["file2"]


def test_hosts_and_hostfile_together_are_refused(files: tuple[str, str]):
    with pytest.raises(UsageError, match="--hosts and --hostfile exclude each other"):
        resolve({}, "gpu1", files[0])
    with pytest.raises(UsageError, match="DDPLAUNCH_HOSTS and DDPLAUNCH_HOSTFILE are both set"):
        resolve({"DDPLAUNCH_HOSTS": "gpu1", "DDPLAUNCH_HOSTFILE": files[0]}, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", None), "--hosts: names no host"),
        ((None, ""), "--hostfile: no file is named"),
        ((None, None, "gpu1"), "--include: no hosts are named"),
        ((None, None, None, "gpu1"), "--exclude: no hosts are named"),
    ],
)
def test_an_empty_option_never_means_this_machine(arguments: tuple, message: str):
    with pytest.raises(UsageError, match=message):
        resolve({}, *arguments)


def test_an_error_names_the_variable_it_comes_from(files: tuple[str, str]):
    with pytest.raises(UsageError, match=r"^DDPLAUNCH_HOSTS a;b: "):
        resolve({"DDPLAUNCH_HOSTS": "a;b"}, None, None)


def test_filters_hold_for_every_way_to_name_hosts(files: tuple[str, str]):
    assert names(resolve({}, "gpu[1-3]", None, "gpu2", None)) == ["gpu2"]
    assert names(resolve({"DDPLAUNCH_HOSTS": "gpu[1-3]"}, None, None, None, "gpu2")) == ["gpu1", "gpu3"]
    assert resolve({}, None, files[0], "file1:0,2") == (Host("file1", devices=("0", "2")),)


# Garbage.

GARBAGE = st.text(st.sampled_from("ag1209[]-,@:=#. %\t\r\n\0\x1b-$") | texts.ENCODABLE, max_size=60)


@given(GARBAGE)
@example("[:")
@example("[1-2]:")
@example("]@[")
def test_garbage_is_hosts_that_are_harmless_or_an_error_that_can_be_printed(text: str):
    hosts: tuple[Host, ...] = ()
    told = ""
    for parse in (parse_hosts, lambda text: parse_hostfile(text, "nodes"), lambda text: select(TWO, text, None)):
        try:
            hosts += parse(text)
        except UsageError as error:
            told += error.message + error.hint
    assert told.isprintable()
    for host in hosts:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9a-fA-F:][0-9a-fA-F:.]*(%[\w.-]+)?", host.name, re.ASCII)
        assert host.user is None or re.fullmatch(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]*", host.user)


@given(GARBAGE, st.none() | GARBAGE)
def test_garbage_in_the_environment_is_an_error_too(hosts: str, exclude: str | None):
    with contextlib.suppress(UsageError):
        resolve({"DDPLAUNCH_HOSTS": hosts}, None, None, None, exclude)


def test_two_ports_of_one_machine_have_two_display_names():
    """The launcher and the log folders tell nodes apart by these names."""
    hosts = parse_hosts("gpu1,ada@gpu1:2222,gpu2:2222,[fd00::1],[fd00::2]:23")
    assert display_names(hosts) == ("gpu1:22", "gpu1:2222", "gpu2", "fd00::1", "fd00::2")
