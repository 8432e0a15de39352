"""Sees the lines that ``--inject ... after-line=`` waits for, on their way to the console."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.injection import Injection
    from ddplaunch.records import Output

_KEPT_BYTES = 1 << 16
"""Of an unfinished line: what is looked for may come in two pieces."""


@dataclass(frozen=True)
class LineSeen:
    """A worker has printed what the injection of this number waits for, in its attempt."""

    number: int


def watched(
    injections: Sequence[Injection],
    output: Callable[[Output, bytes], None],
    post: Callable[[object], None],
) -> Callable[[Output, bytes], None]:
    """``output`` of one node's workers, after a look at the lines; itself where no line is waited for."""
    return _LineWatch(injections, output, post) if any(each.after_line for each in injections) else output


class _LineWatch:
    def __init__(
        self,
        injections: Sequence[Injection],
        output: Callable[[Output, bytes], None],
        post: Callable[[object], None],
    ) -> None:
        self._waiting = [
            (number, each, os.fsencode(each.after_line)) for number, each in enumerate(injections) if each.after_line
        ]
        self._output = output
        self._post = post
        self._posted: set[int] = set()
        self._unfinished: dict[tuple[int, int, str], bytes] = {}

    def __call__(self, header: Output, data: bytes) -> None:
        key = (header.attempt, header.rank, header.stream)
        text = self._unfinished.pop(key, b"") + data
        if rest := text[text.rfind(b"\n") + 1 :]:
            self._unfinished[key] = rest[-_KEPT_BYTES:]
        for number, injection, needle in self._waiting:
            is_meant = injection.attempt == header.attempt and injection.rank in (None, header.rank)
            if is_meant and needle in text:
                self._tell(number)
        self._output(header, data)

    def _tell(self, number: int) -> None:
        if number not in self._posted:
            self._posted.add(number)
            self._post(LineSeen(number))
