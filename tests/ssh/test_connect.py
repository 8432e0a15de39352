"""A host is reached as ssh reaches it, or its user is told the cause in words that help."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import pytest

from ddplaunch.protocol.launcher_agent import Notice, SweepNode
from ddplaunch.transport.failures import failures_table
from tests.support.connecting import ChannelClosed, connecting
from tests.support.nodes import LAB_ADDRESS, NodeOptions
from tests.support.processes import wait_until

pytestmark = pytest.mark.ssh


def test_eight_hosts_are_connected_at_once_and_answer_what_they_are_sent(make_lab):
    lab = make_lab(8)
    with connecting(lab) as them:
        them.start()
        connected, failures = them.settle()
        assert (len(connected), failures) == (8, [])
        for handle in them.handles.values():
            handle.send(SweepNode("mark", (1,)))
        them.wait_for(Notice, 16)
        assert sum("SweepNode" in text for text in them.texts()) == 8
        codes = []
        for handle in them.handles.values():
            handle.end_input()
        for handle in them.handles.values():
            codes.append(handle.close())
        assert codes == [7] * 8
        assert len(them.wait_for(ChannelClosed, 8)) == 8


def test_the_environment_arrives_whole_and_nothing_of_it_is_in_a_command_line(make_lab):
    values = {
        "PLAIN": "1",
        "QUOTED": 'it\'s "$HOME" `id` \\n %d !',
        "LINES": "one\n\ntwo\ttab",
        "UMLAUT": "Grüße\udcff",
        "BIG": "x" * 100_000,
        "UID": "4711",
        "BASH_FUNC_f%%": "() { :; }",
    }
    lab = make_lab(1)
    with connecting(lab) as them:
        them.start(env={**values, "ECHO_NAMES": " ".join(values)}, cwd="/var/tmp")
        them.wait_for(Notice, 1 + len(values))
        said = them.texts()
        assert said[0].endswith("in /var/tmp")
        for name in ("PLAIN", "QUOTED", "LINES", "UMLAUT", "BIG"):
            assert f"{name}={values[name]}" in said
        # What a shell keeps for itself stays the node's.
        assert "UID=4711" not in said
        assert not [line for line in lab["node1"].pids().values() if "xxx" in line or "PLAIN" in line]


def test_new_session_keys_in_the_middle_do_no_harm(make_lab):
    lab = make_lab(1, node1=NodeOptions(sshd=["RekeyLimit 64K"]))
    with connecting(lab) as them:
        them.start()
        for _ in range(60):
            them.handles["node1"].send(SweepNode("x" * 30_000, ()))
        them.wait_for(Notice, 61)
        assert sum("SweepNode" in text for text in them.texts()) == 60


# What goes wrong.


def test_all_that_is_wrong_with_all_hosts_is_told_in_one_table(make_lab):
    refuses = NodeOptions(sshd=["AuthorizedKeysFile none"])
    lab = make_lab(6, node2=refuses, node3=refuses)
    lab["node4"].unplug()
    known = lab.known_hosts.read_text().splitlines(keepends=True)
    lab.known_hosts.write_text("".join(known[:4]))
    with lab.ssh_config.open("a") as config:
        config.write(lab.config_of(lab["node1"], "node17", port=2))
    with connecting(lab, connect_timeout_s=2.0) as them:
        them.start(*(f"node{n}" for n in (1, 2, 3, 4, 5, 6, 17)), "nowhere.invalid")
        connected, failures = them.settle()
        assert len(connected) == 1
        table = failures_table(failures)
        key = lab.keys.client
        for line in (
            f"  node[2-3]: authentication as root failed; tried {key}",
            "  node4: no answer on port 22",
            "  node[5-6]: its host key is unknown",
            "  node17: connection refused on port 2",
            "  nowhere.invalid: the name does not resolve",
        ):
            assert line in table.splitlines(), table
        assert "ssh-keyscan" in table
        assert "--ssh-accept-new" in table


def test_a_login_that_is_refused_is_not_tried_again(make_lab):
    lab = make_lab(1, node1=NodeOptions(sshd=["AuthorizedKeysFile none"]))
    with connecting(lab) as them:
        them.start()
        _, failures = them.settle()
        assert failures[0].cause == "authentication"
        wait_until(lambda: "by authenticating user root" in lab["node1"].log)
        assert lab["node1"].log.count("by authenticating user root") == 1


def test_a_changed_host_key_is_told_loudly_and_no_option_lets_it_pass(make_lab):
    lab = make_lab(1)
    lab.known_hosts.write_text(f"node1 {lab.keys.public('another')}\n")
    lab.ssh_config.write_text(lab.ssh_config.read_text().replace("Checking yes", "Checking no"))
    with connecting(lab, accept_new=True) as them:
        them.start()
        _, (failure,) = them.settle()
        assert failure.cause == "host key"
        assert "ITS HOST KEY HAS CHANGED" in failure.message
        assert f"{lab.known_hosts}:1" in failure.message
        assert "ssh-keygen -R 'node1'" in failure.hint


def test_a_revoked_key_and_one_known_by_its_authority_only_are_told_as_such(make_lab):
    lab = make_lab(2)
    authority, revoked = lab.keys.public("authority"), lab.keys.public("node2")
    lab.known_hosts.write_text(f"@cert-authority * {authority}\nnode2 {revoked}\n@revoked * {revoked}\n")
    with connecting(lab) as them:
        them.start()
        them.settle()
        told = {failure.host: failure.message for failure in them.settle()[1]}
        assert "only a certificate authority" in told["node1"]
        assert "IS REVOKED" in told["node2"]
        assert f"{lab.known_hosts}:3" in told["node2"]


def test_accept_new_remembers_a_host_as_ssh_does(make_lab, tmp_path):
    lab = make_lab(1, node1=NodeOptions(ports=(2222,)))
    known = tmp_path / "new" / "known_hosts"
    text = lab.ssh_config.read_text().replace("HostKeyAlias node1", "HashKnownHosts no")
    lab.ssh_config.write_text(text.replace(str(lab.known_hosts), str(known)))
    with connecting(lab, accept_new=True) as them:
        them.start()
        assert len(them.settle()[0]) == 1
    address = lab["node1"].address
    assert known.read_text() == f"[{address}]:2222 {lab.keys.public('node1')}\n"
    assert known.stat().st_mode & 0o777 == 0o600
    assert lab.run(["ssh", "-F", lab.ssh_config, "node1", "true"]).returncode == 0
    # Also when the file is hashed, by ssh-keygen, or by us.
    subprocess.run(["ssh-keygen", "-H", "-f", known], check=True, capture_output=True)
    with connecting(lab) as them:
        them.start()
        assert len(them.settle()[0]) == 1
    lab.ssh_config.write_text(lab.ssh_config.read_text().replace("HashKnownHosts no", "HashKnownHosts yes"))
    known.write_text("# no line end")
    with connecting(lab, accept_new=True) as them:
        them.start()
        assert len(them.settle()[0]) == 1
    assert known.read_text().startswith("# no line end\n|1|")
    assert lab.run(["ssh", "-F", lab.ssh_config, "node1", "true"]).returncode == 0


def test_a_host_that_swallows_packets_costs_the_connect_timeout_and_no_more(make_lab):
    lab = make_lab(2)
    lab["node2"].unplug()
    started_s = time.monotonic()
    with connecting(lab, connect_timeout_s=1.5) as them:
        them.start()
        connected, (failure,) = them.settle()
        assert len(connected) == 1
        assert (failure.cause, failure.message) == ("timeout", "no answer on port 22")
        assert time.monotonic() - started_s < 10


def test_what_is_no_sshd_is_told_from_one_that_does_not_answer(make_lab):
    lab = make_lab(1)
    with lab.inside(), socket.create_server((LAB_ADDRESS, 0)) as mute, socket.create_server((LAB_ADDRESS, 0)) as web:
        for name, server in (("mute", mute), ("web", web)):
            text = lab.config_of(lab["node1"], name, server.getsockname()[1])
            with lab.ssh_config.open("a") as config:
                config.write(text.replace(lab["node1"].address, LAB_ADDRESS))
        with connecting(lab, connect_timeout_s=3.0) as them:
            them.start("mute", "web")
            connection, _ = web.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n" * 200)
                told = {failure.host: failure.message for failure in them.settle()[1]}
    assert told["mute"].endswith("answers, but its sshd does not")
    assert told["web"] == "the server on this port is not sshd"


def test_a_configuration_ssh_cannot_read_is_told(make_lab):
    lab = make_lab(1)
    circle = "Host a\n  HostName a.x\n  ProxyJump b\nHost b\n  HostName b.x\n  ProxyJump a\n"
    for text, complaint in (("Host *\n  NoSuchOption yes\n", "nosuchoption"), (circle, "goes in a circle")):
        lab.ssh_config.write_text(text)
        with connecting(lab) as them:
            them.start("a")
            _, (failure,) = them.settle()
            assert failure.cause == "configuration"
            assert complaint in failure.message.lower()


# Crowds.


def test_servers_that_hang_up_are_tried_again_until_all_are_in(make_lab):
    lab = make_lab(1, node1=NodeOptions(max_startups="2:80:6"))
    names = [f"alias{n}" for n in range(24)]
    lab.ssh_config.write_text("".join(lab.config_of(lab["node1"], name) for name in names))
    with connecting(lab) as them:
        them.start(*names)
        connected, failures = them.settle()
        assert failures == []
        assert len(connected) == 24
        assert "MaxStartups" in lab["node1"].log


def test_only_algorithms_that_sshs_configuration_allows_are_used(make_lab):
    lab = make_lab(1, node1=NodeOptions(sshd=["LogLevel DEBUG1"]))
    allowed = "Ciphers aes256-ctr\n  MACs hmac-sha2-512\n  KexAlgorithms ecdh-sha2-nistp384\n"
    options = {"chosen": allowed, "unknown": "Ciphers chacha20-poly1305@openssh.com\n", "weak": "Ciphers 3des-cbc\n"}
    with lab.ssh_config.open("a") as config:
        config.writelines(f"{lab.config_of(lab['node1'], name)}  {lines}" for name, lines in options.items())
    with connecting(lab) as them:
        them.start("chosen", "unknown", "weak")
        connected, failures = them.settle()
        assert len(connected) == 1
        by_host = {failure.host: failure for failure in failures}
        assert by_host["unknown"].message == "Ciphers in ssh's configuration: paramiko has none of these"
        assert "no acceptable ciphers" in by_host["weak"].message
        assert all("`ssh -G HOST`" in failure.hint for failure in failures)
        wait_until(lambda: "cipher: aes256-ctr MAC: hmac-sha2-512 compression: none" in lab["node1"].log)
        assert "kex: algorithm: ecdh-sha2-nistp384" in lab["node1"].log


def test_many_targets_share_one_connection_to_their_jump_host(make_lab):
    ports = range(2200, 2204)
    lab = make_lab(5, node1=NodeOptions(max_startups="10:30:100"), default=NodeOptions(ports=ports))
    targets = [
        lab.config_of(node, f"target{n}x{port}", port) + "  ProxyJump node1\n"
        for n, node in enumerate(lab.nodes[1:])
        for port in ports
    ]
    lab.ssh_config.write_text(lab.config_of(lab["node1"]) + "".join(targets))
    names = [text.split()[1] for text in targets]
    with connecting(lab) as them:
        them.start(*names)
        connected, failures = them.settle()
        assert failures == []
        assert len(connected) == 16
        assert lab["node1"].log.count("Accepted publickey") == 1


def test_jumps_can_be_chained_and_hold_for_the_jump_host_itself(make_lab):
    lab = make_lab(4)
    plain = lab.ssh_config.read_text()
    lab.ssh_config.write_text(f"Host node3\n  ProxyJump node1,root@node2\nHost node?\n  ProxyJump node1\n{plain}")
    with connecting(lab) as them:
        them.start("node3", "node4")
        connected, failures = them.settle()
        assert failures == []
        assert len(connected) == 2
        assert [lab[f"node{n}"].log.count("Accepted publickey") for n in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_a_jump_host_that_refuses_is_tried_once_for_all_who_need_it(make_lab):
    lab = make_lab(
        4, node1=NodeOptions(sshd=["AuthorizedKeysFile none"]), node2=NodeOptions(sshd=["AllowTcpForwarding no"])
    )
    targets = [lab.config_of(lab["node3"], f"t{n}") + "  ProxyJump node1\n" for n in range(6)]
    other = lab.config_of(lab["node3"], "u1") + "  ProxyJump node2\n"
    dead = lab.config_of(lab["node3"], "u2", port=4) + "  ProxyJump node4\n"
    lab.ssh_config.write_text(lab.ssh_config.read_text() + "".join([*targets, other, dead]))
    with connecting(lab) as them:
        them.start(*(f"t{n}" for n in range(6)), "u1", "u2")
        _, failures = them.settle()
        table = failures_table(failures)
        assert "  t[0-5]: jump host node1: authentication as root failed" in table
        assert "  u1: jump host node2 does not forward connections" in table
        assert "  u2: no connection from jump host node4 to port 4" in table
        assert lab["node1"].log.count("by authenticating user root") == 1


def test_a_proxy_command_is_run_as_ssh_runs_it(make_lab):
    lab = make_lab(2)
    proxy = lab.config_of(lab["node2"], "behind") + f"  ProxyCommand ssh -F {lab.ssh_config} -W %h:%p node1\n"
    broken = lab.config_of(lab["node2"], "broken") + "  ProxyCommand false\n"
    lab.ssh_config.write_text(lab.ssh_config.read_text() + proxy + broken)
    with connecting(lab) as them:
        them.start("behind", "broken")
        connected, (failure,) = them.settle()
        assert len(connected) == 1
        assert failure.message == "its ProxyCommand ended with exit code 1"


# Keys.


def test_keys_of_an_agent_and_certificates_log_in(make_lab, tmp_path):
    trusted = tmp_path / "authority.pub"
    lab = make_lab(2, node2=NodeOptions(sshd=["AuthorizedKeysFile none", f"TrustedUserCAKeys {trusted}"]))
    trusted.write_text(lab.keys.public("authority") + "\n")
    key = tmp_path / "key"
    shutil.copy(lab.keys.make("plain"), key)
    shutil.copy(f"{lab.keys.make('plain')}.pub", f"{key}.pub")
    sign = ["ssh-keygen", "-q", "-s", lab.keys.make("authority"), "-I", "me", "-n", "root", f"{key}.pub"]
    subprocess.run(sign, check=True)
    sock = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    try:
        wait_until(sock.exists)
        env = {**os.environ, "SSH_AUTH_SOCK": str(sock)}
        subprocess.run(["ssh-add", "-q", lab.keys.client], env=env, check=True)
        text = lab.config_of(lab["node1"]).replace(f"IdentityFile {lab.keys.client}", f"IdentityAgent {sock}")
        text = text.replace("IdentitiesOnly yes", "IdentitiesOnly no")
        lab.ssh_config.write_text(text + lab.config_of(lab["node2"]).replace(str(lab.keys.client), str(key)))
        with connecting(lab) as them:
            them.start()
            connected, failures = them.settle()
            assert failures == []
            assert len(connected) == 2
    finally:
        agent.kill()
        agent.wait()


def test_a_key_that_cannot_be_used_is_named_with_the_reason(make_lab, tmp_path):
    lab = make_lab(1)
    locked, junk = tmp_path / "locked", tmp_path / "junk"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    junk.write_text("this is not a key\n")
    text = lab.ssh_config.read_text()
    lab.ssh_config.write_text(text.replace(str(lab.keys.client), f"{locked}\n  IdentityFile {junk}"))
    with connecting(lab) as them:
        them.start()
        _, (failure,) = them.settle()
        assert f"{locked} (locked by a passphrase: ssh-add it)" in failure.message
        assert f"{junk} (unknown key format)" in failure.message
