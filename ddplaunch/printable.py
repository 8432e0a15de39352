"""What messages are made of: text of others, which must not steer the terminal, and numbers of bytes. Pure."""

from __future__ import annotations

_UNITS = ((30, "GB"), (20, "MB"), (10, "kB"))


def printable(text: str) -> str:
    """``text`` with all control characters but line ends and tabs escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def shown(text: str, limit: int = 80) -> str:
    """The text as a message may quote it: printable, on one line, and not endless."""
    start = printable(text[:limit]).replace("\n", r"\n").replace("\t", r"\t")
    return start + ("..." if len(text) > limit else "")


def size(count: float) -> str:
    """Two digits at least, in the largest unit that has them."""
    for bits, unit in _UNITS:
        if count >= 10 << bits:
            return f"{count / (1 << bits):.0f} {unit}"
        if count >= 1 << bits:
            return f"{count / (1 << bits):.1f} {unit}"
    return f"{count:.0f} B"
