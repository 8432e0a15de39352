"""Signatures of the records of a rendezvous: valid for one secret, one rendezvous and one key of the store."""

from __future__ import annotations

import pytest

from ddplaunch.rendezvous.store import Signer

SECRET, KEY, TEXT = "sixteen letters!", "ddplaunch/job7/in/3", '{"record":"NodeLeft","node_index":0}\n'


def signed(secret: str = SECRET, nonce: str = "first", key: str = KEY) -> bytes:
    return Signer(secret, nonce).sign(key, TEXT).encode()


def test_a_node_of_the_rendezvous_reads_what_another_has_signed():
    assert Signer(SECRET, "first").verify(KEY, signed()) == TEXT.encode()
    assert Signer(SECRET).for_nonce("first").verify(KEY, signed()) == TEXT.encode()


@pytest.mark.parametrize(
    "value",
    [
        signed(secret="another secret!!"),
        signed(nonce="second"),
        signed(key="ddplaunch/job7/in/4"),
        signed().replace(b"0}", b"1}"),
        b"0" * 64 + b" " + TEXT.encode(),
        b" " + TEXT.encode(),
        TEXT.encode(),
        b"",
        b"\xff\x00",
    ],
)
def test_anything_else_is_invalid(value: bytes):
    assert Signer(SECRET, "first").verify(KEY, value) is None


def test_without_a_secret_nothing_is_signed():
    assert Signer("", "first").sign(KEY, TEXT) == TEXT
    assert Signer("").verify(KEY, TEXT.encode()) == TEXT.encode()


def test_a_secret_of_any_bytes_can_be_used():
    assert Signer("\udcff" * 16).verify(KEY, Signer("\udcff" * 16).sign(KEY, TEXT).encode()) == TEXT.encode()
