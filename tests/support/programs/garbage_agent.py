"""Stands in for an agent on another machine: ``main`` writes the bytes that GARBAGE has in hexadecimal, and waits."""

import os
import sys


def main() -> None:
    sys.stdout.buffer.write(bytes.fromhex(os.environ["GARBAGE"]))
    sys.stdout.flush()
    sys.stdin.read()
