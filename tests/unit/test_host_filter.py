"""Some of the named hosts, as DeepSpeed chooses them; its own ``tests/unit/launcher/test_run.py`` is the model.

One thing differs: excluding everything is an error.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.cli.host_options import select_hosts
from ddplaunch.cluster.hosts import parse_hosts
from ddplaunch.errors import UsageError
from ddplaunch.features.host_filter.hosts import filtered
from tests.support import golden
from tests.unit.test_hosts import GARBAGE, as_written


def chosen(question: str) -> str:
    text, *options = question.split(" ")
    given = dict(zip(options[::2], options[1::2], strict=True))
    return as_written(filtered(parse_hosts(text), given.get("--include"), given.get("--exclude")))


def test_deepspeeds_filters_leave_what_deepspeed_leaves():
    golden.check_answers("host_filters", chosen)


def test_a_filter_that_is_empty_is_told():
    with pytest.raises(UsageError, match="--include : no host name"):
        filtered(parse_hosts("gpu1"), "", None)


@given(GARBAGE, st.none() | GARBAGE, st.none() | GARBAGE)
def test_garbage_leaves_some_of_the_hosts_or_is_an_error_that_can_be_printed(
    hosts: str, include: str | None, exclude: str | None
):
    names = ("hosts", "hostfile", "avoid", "nnodes", "rdzv_endpoint", "master_addr", "standalone", "master_port")
    options = {**dict.fromkeys((*names, "dry_run")), "include": include, "exclude": exclude}
    for environ in ({"DDPLAUNCH_HOSTS": hosts}, {"DDPLAUNCH_HOSTS": "worker-[0-1]:slots=4"}):
        with contextlib.suppress(UsageError):
            assert {host.name for host in select_hosts(options, environ)} <= {
                host.name for host in parse_hosts(environ["DDPLAUNCH_HOSTS"])
            }
