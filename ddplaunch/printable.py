"""Text that others have made, as a terminal may be given it: it must not steer the terminal. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with all control characters but line ends and tabs escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def shown(text: str, limit: int = 80) -> str:
    """The text as a message may quote it: printable, on one line, and not endless."""
    start = printable(text[:limit]).replace("\n", r"\n").replace("\t", r"\t")
    return start + ("..." if len(text) > limit else "")
