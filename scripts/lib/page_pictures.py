"""Makes the pictures of docs/run-page.md: three real runs, as dry runs on this machine, and their pages in Chromium.

``page_pictures.py [NAME...]``; without names all. A run takes about a minute.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from ddplaunch.features.page.make import make  # noqa: E402
from tests.support.chromium import Chromium  # noqa: E402

SCRIPT = "scripts/examples/train_digits.py"
DRY = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "2", "--hosts")
RUNS = {
    "good": (*DRY, "gpu[1-2]", SCRIPT, "--epochs", "120"),
    "lost-node": (*DRY, "gpu[1-3]", "--inject", "lose node=1 after=10s", SCRIPT, "--epochs", "120"),
    "hang": (
        *(*DRY, "gpu[1-2]", "--inject", "hang rank=2 after=25s", "--hang-report", "15s", "--hang-timeout", "30s"),
        *(SCRIPT, "--epochs", "10000"),
    ),
}
WIDTH, HEIGHT, SCALE = 1180, 1250, 0.75


def main() -> None:
    """Make them."""
    names = sys.argv[1:] or list(RUNS)
    with tempfile.TemporaryDirectory() as base, Chromium() as browser:
        for name in names:
            folder = run(Path(base), name)
            browser.open(f"file://{make(folder)}", WIDTH, HEIGHT)
            picture = ROOT / "docs" / "images" / f"run-page-{name}.png"
            picture.parent.mkdir(exist_ok=True)
            browser.picture(picture, HEIGHT, SCALE)
            picture.write_bytes(smaller(picture.read_bytes()))
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size} bytes")


def run(base: Path, name: str) -> Path:
    """Run the job; returns its run folder."""
    program = base / "bin" / "ddplaunch"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nfrom ddplaunch.__main__ import main\n\nmain()\n")
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(base)}
    command = ("ddplaunch", "--rdzv-id", f"digits-{name}", *RUNS[name])
    environ = {**os.environ, **path, "DDPLAUNCH_PAGE": "off"}
    subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return base / "ddplaunch" / f"digits-{name}"


def smaller(png: bytes) -> bytes:
    """The picture with 256 colours, compressed as much as zlib can; 8-bit RGB or RGBA only."""
    at, data, head = 8, b"", b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        head, data = (body, data) if kind == b"IHDR" else (head, data + body) if kind == b"IDAT" else (head, data)
        at += length + 12
    width, height, depth, colour = struct.unpack(">IIBB", head[:10])
    assert (depth, colour) in ((8, 2), (8, 6))
    rows = unfiltered(zlib.decompress(data), width, height, 3 if colour == 2 else 4)
    table = bytes(min(255, round(value / 8) * 8) for value in range(256))
    step = 3 if colour == 2 else 4
    pixels = [[row[x : x + 3] for x in range(0, len(row), step)] for row in (each.translate(table) for each in rows)]
    frequent = Counter(pixel for row in pixels for pixel in row).most_common(256)
    palette = {pixel: number for number, (pixel, _) in enumerate(frequent)}
    indexed = bytearray()
    _NEAREST.clear()
    for row in pixels:
        indexed.append(0)
        indexed.extend(nearest(palette, pixel) for pixel in row)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(palette)),
        (b"IDAT", zlib.compress(bytes(indexed), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


_NEAREST: dict[bytes, int] = {}


def nearest(palette: dict[bytes, int], colour: bytes) -> int:
    """The number of the colour in a full palette that is most like ``colour``."""
    if colour in palette:
        return palette[colour]
    if colour not in _NEAREST:
        like = min(palette, key=lambda each: sum(abs(a - b) for a, b in zip(each, colour, strict=True)))
        _NEAREST[colour] = palette[like]
    return _NEAREST[colour]


def unfiltered(data: bytes, width: int, height: int, step: int) -> list[bytes]:
    """The rows of a PNG without their filters (PNG specification, chapter 9)."""
    rows, above, size = [], bytearray(width * step), width * step
    for y in range(height):
        kind, row = data[y * (size + 1)], bytearray(data[y * (size + 1) + 1 : (y + 1) * (size + 1)])
        for x in range(size):
            left = row[x - step] if x >= step else 0
            corner = above[x - step] if x >= step else 0
            row[x] = (row[x] + (0, left, above[x], (left + above[x]) // 2, paeth(left, above[x], corner))[kind]) & 255
        rows.append(bytes(row))
        above = row
    return rows


def paeth(left: int, up: int, corner: int) -> int:
    """The predictor of filter type 4."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))


if __name__ == "__main__":
    main()
