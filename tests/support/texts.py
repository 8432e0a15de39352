"""Characters for ``st.text``, as often ASCII as not.

Those of hypothesis need tables of Unicode, which each process of a fresh clone would make for some 5 s of a CPU.
"""

from __future__ import annotations

from hypothesis import strategies as st

_ASCII, _LOW, _HIGH = st.integers(0, 0x7F), st.integers(0x80, 0xD7FF), st.integers(0xE000, 0x10FFFF)

ENCODABLE = (_ASCII | _LOW | _HIGH).map(chr)
"""Characters that UTF-8 has."""

DECODED = (_ASCII | _LOW | _HIGH | st.integers(0xDC80, 0xDCFF)).map(chr)
"""What ``os.fsdecode`` can give: also escapes of bytes that are no UTF-8."""

ANY = (_ASCII | _LOW | _HIGH | st.integers(0xD800, 0xDFFF)).map(chr)
"""Also surrogates that stand for nothing."""

PRINTABLE = st.sampled_from([each for each in map(chr, range(0x3000)) if each.isprintable()])
