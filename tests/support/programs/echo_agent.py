"""Stands in for an agent on another machine: ``main`` tells what it gets until its stdin ends, then exits with 7."""

import os
import sys

from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice


def say(text):
    os.write(1, wire.encode(Notice(text)))


def main():
    say(f"ready (pid: {os.getpid()}) in {os.getcwd()}")
    for name in os.environ.get("ECHO_NAMES", "").split():
        say(f"{name}={os.environ.get(name)}")
    for line in os.environ.get("ECHO_ERRORS", "").split():
        print(line, file=sys.stderr, flush=True)
    for line in sys.stdin.buffer:
        say(f"{len(line)} bytes: {line[:60].decode()}")
    sys.exit(7)
