"""Signs the records in the store of a rendezvous, so that only nodes of the run can write them.

Runs in the member process. Nothing is encrypted. Without a secret nothing is signed: whoever reaches the store can then
write records.
"""

from __future__ import annotations

import hmac
import os


class Signer:
    """Signs texts with a secret; a signature is valid for one key of the store in one rendezvous.

    Attributes:
        nonce: text of the rendezvous, with a random part; empty before the rendezvous is open.
    """

    def __init__(self, secret: str, nonce: str = "") -> None:
        """With ``nonce``, a record of an earlier rendezvous is invalid."""
        self._secret, self.nonce = secret, nonce
        self._key = hmac.digest(os.fsencode(secret), nonce.encode(), "sha256") if secret else b""

    def for_nonce(self, nonce: str) -> Signer:
        """The signer of the rendezvous with this nonce."""
        return Signer(self._secret, nonce)

    @property
    def has_secret(self) -> bool:
        """Whether texts are signed."""
        return bool(self._key)

    def sign(self, store_key: str, text: str) -> str:
        """The value to store at ``store_key`` for an ASCII text."""
        return f"{self._signature(store_key, text.encode())} {text}" if self._key else text

    def verify(self, store_key: str, value: bytes) -> bytes | None:
        """The text in a value of the store; None if its signature is missing or invalid."""
        if not self._key:
            return value
        signature, _, text = value.partition(b" ")
        return text if hmac.compare_digest(signature, self._signature(store_key, text).encode()) else None

    def _signature(self, store_key: str, text: bytes) -> str:
        return hmac.digest(self._key, store_key.encode() + b"\n" + text, "sha256").hex()
