"""The known_hosts files are read as OpenSSH reads them, and fast."""

from __future__ import annotations

import time

import pytest

from ddplaunch.features.ssh.known_hosts import KnownHosts, host_names
from tests.support import golden

ED, RSA = "ssh-ed25519", "ssh-rsa"


def known(tmp_path, text, **options):
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return KnownHosts([path, tmp_path / "not there"], **options)


def test_a_host_is_looked_up_by_its_alias_or_by_name_and_port():
    assert host_names("GPU1", 22) == ("gpu1",)
    assert host_names("gpu1", 2222) == ("[gpu1]:2222", "gpu1")
    assert host_names("10.0.0.1", 2222, "Cluster") == ("cluster",)


def test_what_a_line_says_of_a_key(tmp_path):
    def result(question: str) -> str:
        line, _, names = question.partition(" | ")
        return known(tmp_path, line.replace(" T ", f" {ED} ")).check(names.split(), ED, "K")[0]

    golden.check_answers("known_hosts", result)


def test_the_place_of_the_line_is_told(tmp_path):
    _, location = known(tmp_path, f"a {ED} K\n\ngpu1 {ED} other\n").check(["gpu1"], ED, "K")
    assert location == f"{tmp_path}/known_hosts:3"


def test_the_types_known_for_a_host_are_told_in_order(tmp_path):
    file = known(tmp_path, f"gpu1 {RSA} K\n@revoked gpu1 ssh-dss K\ngpu* {ED} K\ngpu1 {RSA} L\n")
    assert file.key_types(["gpu1"]) == (RSA, ED)


def test_a_new_host_is_remembered_once_and_on_a_line_of_its_own(tmp_path):
    file = known(tmp_path, "# last line")
    for _ in range(2):
        file.add("[gpu1]:2222", ED, "K", hashed=False)
    assert (tmp_path / "known_hosts").read_text() == f"# last line\n[gpu1]:2222 {ED} K\n"
    assert file.check(["[gpu1]:2222"], ED, "K")[0] == "known"
    assert file.check(["[gpu1]:2222"], ED, "L")[0] == "changed"
    file.add("gpu2", ED, "K", hashed=True)
    assert "gpu2" not in (tmp_path / "known_hosts").read_text()
    assert KnownHosts([tmp_path / "known_hosts"]).check(["gpu2"], ED, "K")[0] == "known"


def test_a_list_of_revoked_keys_is_heeded_and_a_binary_one_refused(tmp_path):
    revoked = tmp_path / "revoked"
    revoked.write_text(f"# these\n{ED} K old laptop\n")
    assert known(tmp_path, f"gpu1 {ED} K\n", revoked_keys=revoked).check(["gpu1"], ED, "K")[0] == "revoked"
    revoked.write_bytes(b"SSHKRL\n\0")
    with pytest.raises(ValueError, match="only OpenSSH"):
        known(tmp_path, "", revoked_keys=revoked)


def test_a_large_file_costs_little(tmp_path):
    salted = "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg="
    lines = [f"gpu{n},10.1.{n // 250}.{n % 250} {ED} K{n}\n" for n in range(10_000)] + [f"{salted} {ED} K\n"] * 2000
    file = known(tmp_path, "".join(lines))
    started_s = time.process_time()
    for n in range(64):
        assert file.check([f"gpu{n}"], ED, f"K{n}")[0] == "known"
    # paramiko takes 35 ms for each.
    assert time.process_time() - started_s < 64 * 0.02
