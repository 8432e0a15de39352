"""While hosts are being connected to, the terminal says how far that is and who is missing."""

from __future__ import annotations

import os

import pytest

from ddplaunch.features.health import node_memory
from tests.support.terminal import terminal

pytestmark = pytest.mark.ssh


def test_a_host_that_swallows_packets_is_named_while_it_is_waited_for(make_lab):
    lab = make_lab(3)
    lab["node2"].unplug()
    hosts = ("--hosts", "node[1-3]", "--ssh-config", lab.ssh_config, "--connect-timeout", "4")
    env = {"TERM": "xterm", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    with terminal() as opened:
        given = ("-x", "DDPLAUNCH_TEST_MARK", "--nnodes", "2:3", "--nproc-per-node", "1", "--no-python", "true")
        running = opened.start(*hosts, *given, under=lab.prefix, env=env)
        finished = running.finish()
    assert finished.returncode == 0
    assert "\rddplaunch: connecting" not in finished.out, "each is written over the last"
    assert "ddplaunch: connecting: 2 of 3 nodes, waiting for node2\r\x1b[K" in finished.out
    said = [line.rpartition("\x1b[K")[2] for line in finished.out.splitlines()]
    assert "ddplaunch: node2 cannot be used: no answer on port 22; the job runs without it" in said
    noted = [(event.host, event.kind, event.text) for event in node_memory.remembered()[0]]
    assert noted == [("node2", "unexplained", "node2 could not be reached: no answer on port 22")]
