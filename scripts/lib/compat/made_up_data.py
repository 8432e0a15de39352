"""Writes the data of the programs, small and made up. Argument: the folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

TOKENS = (np.arange(5000) % 60).astype(np.uint16)


def write_to(folder: Path) -> None:
    """Fill ``folder``: tokens, tokens in llm.c's format, texts, images in folders by split and class, a model hub."""
    folder.mkdir(parents=True, exist_ok=True)
    TOKENS.tofile(folder / "tokens.bin")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(TOKENS)
    (folder / "llmc.bin").write_bytes(header.tobytes() + TOKENS.tobytes())
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    counts = (" ".join(str(first + step) for step in range(200)) for first in range(200))
    (folder / "texts.json").write_text("".join(json.dumps({"text": count}) + "\n" for count in counts))
    for number in range(32):
        split, label = ("train", "val")[number % 2], ("a", "b")[number // 2 % 2]
        image = folder / "images" / split / label / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(64 * 64 * 3)).save(image)
    # dino asks for the list of these models as it starts; without a copy it downloads the repository.
    hub = folder / "torch_home" / "hub" / "facebookresearch_xcit_main"
    hub.mkdir(parents=True, exist_ok=True)
    (hub / "hubconf.py").write_text("dependencies = []\n")


if __name__ == "__main__":
    write_to(Path(sys.argv[1]))
