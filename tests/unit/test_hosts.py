"""Hosts are named as users, DeepSpeed and Open MPI write them, and what cannot be meant is told, never guessed.

The tables of DeepSpeed's own ``tests/unit/launcher/test_run.py`` are kept, but for three things: a hostfile's host
needs no slots, a bare host on several lines is PBS's way to count them, and excluding everything is an error.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.cluster.hostfile import parse_hostfile, read_hostfile
from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST, Host, display_names, expand, fold, parse_hosts
from ddplaunch.errors import USAGE, UsageError
from tests.support import golden, texts


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [str(host) for host in hosts]


# --hosts.


def as_written(hosts: tuple[Host, ...]) -> str:
    """With slots and devices, which ``str`` leaves out."""
    slots = [f":slots={host.slots}" if host.slots else "" for host in hosts]
    devices = [f" devices={','.join(host.devices)}" if host.devices else "" for host in hosts]
    return " ".join(f"{host}{slot}{device}" for host, slot, device in zip(hosts, slots, devices, strict=True))


def test_a_list_of_hosts_is_read_or_told_to_be_none():
    golden.check_answers("hosts", lambda text: as_written(parse_hosts(text)))


@pytest.mark.parametrize("text", ["", "x" * 254, "gpu[" + "9" * 5000 + "]", "x" + "[0-9]" * 5000])
def test_what_is_too_short_or_too_long_is_no_list_of_hosts(text: str):
    with pytest.raises(UsageError, match=r"names no host|longer than a host name|brackets hold|more than") as caught:
        parse_hosts(text)
    assert caught.value.message.startswith("--hosts")
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("character", [*" \t\n\r\0\x1b\x7f\"'`$\\;&|<>(){}*?!#~^%=/", "ä", "٣", "\u2028", "\udcff"])
def test_nothing_that_a_shell_or_a_terminal_could_act_on_is_part_of_a_name(character: str):
    for text in (f"gpu{character}1", f"me{character}x@gpu1"):
        with pytest.raises(UsageError, match="cannot be in a") as caught:
            parse_hosts(text)
        assert caught.value.message.isprintable()


def test_no_host_can_be_made_in_any_other_way_either():
    golden.check_answers("host_fields", lambda text: as_written((Host(**{"name": "gpu1", **json.loads(text)}),)))


# Folding.


def test_many_names_are_told_in_few_words_in_natural_order():
    golden.check_answers("folded_hosts", lambda names: fold(names.split()))
    assert fold([]) == ""


NAMES = st.builds(
    "".join,
    st.lists(st.sampled_from(["gpu", "n", "-", ".c", "0", "1", "2", "8", "9", "10", "09", "99", "100"]), max_size=5),
).filter(lambda name: name and name[0] not in "-." and not re.fullmatch(r"\d+(\.\d+){3}", name))


WRITTEN = st.builds(
    lambda user, name, port: f"{user}{name}{port}",
    st.sampled_from(["", "me@", "u2@"]),
    NAMES | st.sampled_from(["[fd00::1]", "[fd00::2]", "10.0.0.1", "10.0.0.2"]),
    st.sampled_from(["", ":2201", ":2202"]),
)


@given(st.lists(NAMES, min_size=1, max_size=40) | st.lists(WRITTEN, min_size=1, max_size=20))
@example(["n1a1", "n1a2", "n2a2"])
def test_what_was_folded_can_be_read_as_hosts_again(many: list[str]):
    unique = {parse_hosts(text)[0].machine: text for text in many}.values()
    text = fold(unique)
    assert sorted(names(parse_hosts(text))) == sorted(unique)
    assert fold(names(parse_hosts(text))) == text


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


def test_hostfiles_of_others_work_as_they_are_and_other_lines_are_told():
    golden.check_answers("hostfiles", lambda text: as_written(parse_hostfile(text, "nodes")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nodes: names no host"),
        ("gpu1 slots=" + "9" * 5000, "is not a valid setting"),
        ("gpu1\n" * (MAX_SLOTS_PER_HOST + 1), "nodes: gpu1 has 4,097 lines"),
        ("x" * 100_000, "nodes:1: a line of 100,000 characters"),
    ],
)
def test_a_hostfile_that_is_too_large_is_told(text: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_hostfile(text, "nodes")


def test_a_list_of_too_many_hosts_or_slots_is_told(monkeypatch: pytest.MonkeyPatch):
    """The limits are lower here, because to reach them takes seconds."""
    monkeypatch.setattr("ddplaunch.cluster.hosts.MAX_HOSTS", 10)
    monkeypatch.setattr("ddplaunch.cluster.hostfile._MAX_SLOTS", 20)
    for parse, text, message in (
        (parse_hosts, "a[0-4],b[0-5]", "--hosts: more than 10 hosts"),
        (lambda text: parse_hostfile(text, "nodes"), "a[0-4]\nb[0-5]\n", "nodes:2: more than 10 hosts"),
        (lambda text: parse_hostfile(text, "nodes"), "gpu1\n" * 21, "nodes:21: more than 20 slots"),
    ):
        with pytest.raises(UsageError, match=message):
            parse(text)


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


# Garbage.

GARBAGE = st.text(st.sampled_from("ag1209[]-,@:=#. %\t\r\n\0\x1b-$") | texts.ENCODABLE, max_size=60)


@given(GARBAGE)
@example("[:")
@example("[1-2]:")
@example("]@[")
def test_garbage_is_hosts_that_are_harmless_or_an_error_that_can_be_printed(text: str):
    hosts: tuple[Host, ...] = ()
    told = ""
    for parse in (
        parse_hosts,
        lambda text: parse_hostfile(text, "nodes"),
    ):
        try:
            hosts += parse(text)
        except UsageError as error:
            told += error.message + error.hint
    assert told.isprintable()
    for host in hosts:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9a-fA-F:][0-9a-fA-F:.]*(%[\w.-]+)?", host.name, re.ASCII)
        assert host.user is None or re.fullmatch(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]*", host.user)


def test_two_ports_of_one_machine_have_two_display_names():
    """The launcher and the log folders tell nodes apart by these names."""
    hosts = parse_hosts("gpu1,ada@gpu1:2222,gpu2:2222,[fd00::1],[fd00::2]:23")
    assert display_names(hosts) == ("gpu1:22", "gpu1:2222", "gpu2", "fd00::1", "fd00::2")
