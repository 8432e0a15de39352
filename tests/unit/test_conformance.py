"""Every promise that PyTorch's own tests make for torchrun is one of ours too, or a difference that the docs name.

A test that keeps such a promise says so in its docstring, by the name of PyTorch's test file and the numbers below:
``torchrun: test_run 7; agent_api_test 3, 4.`` Left out are promises about the insides: how a state is stored and
compared, which method calls which how often, what is mocked; and Windows.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.runs import ROOT

PROMISES: dict[str, dict[int, str]] = {
    "test_run": {
        1: "a script runs once per rank, with all variables and what was inherited",
        2: "--master-addr, --master-port and --node-rank",
        3: "--no-python; not together with --module",
        4: "the number of workers by default",
        5: "every option as PET_*, flags too",
        6: "auto, cpu, gpu, xpu or a number of workers",
        7: "elastic 1:2 starts with one node after the last call",
        8: "elastic with two nodes: all ranks, both exit with 0",
        9: "a worker's exception is one error and one event",
        10: "an agent's exception is one error",
        11: "--standalone",
        12: "--run-path",
        13: "N, MIN:MAX and nothing else for --nnodes",
        14: "the rendezvous is closed once all have succeeded",
        15: "is_torchelastic_launched",
        16: "--logs-specs",
        17: "init_method env:// and tcp:// with the agent's store",
        18: "--redirect=3 --tee=3 with a prefix template",
        19: "--virtual-local-rank",
    },
    "launch_test": {1: "--local-rank is LOCAL_RANK", 2: "--use-env passes none"},
    "argparse_util_test": {1: "option over PET_* over default", 2: "flags in the environment"},
    "launcher_api_test": {
        1: "scripts and programs from Python",
        2: "functions and what they return, by rank",
        3: "static rendezvous with an all-reduce",
        4: "a signal to the launcher ends the job by that signal",
        5: "an error of the agent ends the job in order",
        6: "the signals to handle, default and chosen",
    },
    "agent_api_test": {
        1: "ranks of one node",
        2: "MASTER_ADDR by default, and by --local-addr",
        3: "workers are started, and started again, several times",
        4: "no restart is used up where nothing fails",
        5: "a start that fails is told as such",
        6: "exactly max_restarts + 1 attempts, then failed",
        7: "nodes that come or go use up no restart",
        8: "ranks over nodes of 4, 1, 2, 3 and 5 workers",
        9: "ranks within roles",
        10: "fields of the events",
        11: "a signal ends the workers by that signal",
        12: "a node that turns out not to be needed ends well",
    },
    "local_elastic_agent_test": {
        1: "what functions return",
        2: "address and port of the workers' store can be fixed",
        3: "all variables are there",
        4: "TORCH_NCCL_ASYNC_ERROR_HANDLING: the user's",
        5: "the timer's variable",
        6: "the health check's port",
        7: "gloo's sum over nodes of one size",
        8: "gloo's sum over nodes of different sizes",
        9: "a prefix template",
        10: "the process above finds the first failure in its error file",
        11: "all restarts are used up, then failed",
        12: "ranks are contiguous on a node, and within a role",
        13: "a killed node is started again, and all end with 0",
        14: "a failure ends all nodes at once",
        15: "elastic 1:2: the other node is killed, this one ends with 0",
        16: "RPC",
        17: "nodes that end at different times have succeeded",
        18: "no or a failing exit barrier is no failure",
        19: "a rank kills itself once: recovered",
    },
    "shutdown_timeout_test": {1: "30, the environment's, the option's", 2: "0, not less", 3: "it is what workers get"},
    "exit_barrier_timeout_test": {1: "how long nodes wait for each other at the end"},
    "multiprocessing_api_test": {
        1: "the grammar of --tee and --redirects",
        2: "local ranks that are not named",
        3: "a log folder that is a file",
        4: "an end leaves no process",
        5: "in a thread that is not the main one",
        6: "an exception is one failure, with an error file at a known place",
        7: "the end of a worker is that of its process, not of its script's last line",
        8: "a program's exit code, and those that were stopped for it",
        9: "a program that is not there",
        10: "streams by rank: file, console or both",
        11: "lines with a needle are copied, with a prefix",
        12: "sys.exit is told without an exception",
        13: "SIGSEGV by its name",
        14: "a signal to the launcher leaves nobody, forked or not",
        15: "stop signals by default and by choice",
        16: "names that are no signals",
        17: "SIGUSR1 and SIGUSR2",
    },
    "errors_api_test": {
        1: "an error file in another schema",
        2: "both forms of an error file, its time as a number or a text",
        3: "the text for a signal, and for no error file",
        4: "the earliest failure is the first",
        5: "what @record records",
        6: "SystemExit 0 and 1: no error file",
        7: "no place for an error file, or no failure: none",
        8: "the first failure goes to the process above, with its exit code",
        9: "what was there before is overwritten",
    },
    "tail_log_test": {
        1: "many writers, no line lost",
        2: "a file that is not there",
        3: "prefixes and filters",
        4: "an error of ours is told once",
    },
    "redirects_test": {1: "output of Python, C and programs", 2: "very many lines"},
    "rendezvous": {
        1: "the list of settings and its values",
        2: "backends that are not known",
        3: "endpoints in all their forms",
        4: "the node whose address the endpoint is serves",
        5: "is_host; whoever comes second at one address is a client",
        6: "the default port, read_timeout, an endpoint where nobody serves",
        7: "only TCP or a file",
        8: "static: a port, an endpoint and a rank are needed",
        9: "times above 0",
        10: "join timeout",
        11: "last call",
        12: "heartbeats: a silent node is lost",
        13: "a node beyond MAX waits, and takes a place that is free",
        14: "a round's store, its address by --local-addr",
        15: "another node becomes the first: all hear the new address",
        16: "who comes after the end is told so",
        17: "plug-ins of rendezvous",
    },
    "timer": {1: "timers over a file"},
    "utils": {1: "a port that is taken"},
    "test_numa_binding": {1: "node", 2: "socket", 3: "exclusive", 4: "core-complex"},
}
"""By PyTorch's test files, in few words: ``launcher_api_test`` is launcher/api_test.py, ``agent_api_test`` that of
elastic/agent/server, ``rendezvous`` and ``timer`` all below elastic/rendezvous and elastic/timer."""

DIFFERENCES = {
    "workers by default": {"test_run": (4,)},
    "etcd backends, rendezvous plug-ins, `--logs-specs` (except `default`), file timers": {
        "test_run": (16,),
        "local_elastic_agent_test": (5,),
        "rendezvous": (2, 7, 17),
        "timer": (1,),
    },
    "TORCHELASTIC_HEALTH_CHECK_PORT": {"local_elastic_agent_test": (6,)},
    "functions as workers (`elastic_launch`)": {"launcher_api_test": (2,), "local_elastic_agent_test": (1,)},
    "roles that differ between nodes": {"agent_api_test": (9,), "local_elastic_agent_test": (12,)},
    "MASTER_ADDR on one node": {"agent_api_test": (2,)},
    "a node is lost": {"local_elastic_agent_test": (13,)},
    "the end, several nodes": {"local_elastic_agent_test": (18,), "exit_barrier_timeout_test": (1,)},
    "`--signals-to-handle` with an unknown name": {"multiprocessing_api_test": (16,)},
    "restart": {"rendezvous": (14,)},
    "three attempts in a row with one programming error and traceback": {"agent_api_test": (6,)},
}
"""First cells of rows in docs/differences-from-torchrun.md, and the promises they take the place of."""

Ids = set[tuple[str, int]]


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for item in (tree, *ast.walk(tree)):
            if isinstance(item, (ast.Module, ast.FunctionDef)) and "torchrun: " in (ast.get_docstring(item) or ""):
                yield f"{path.name}::{getattr(item, 'name', '')}", ast.get_docstring(item) or ""


def _kept(docstring: str) -> Ids:
    found: Ids = set()
    for name, numbers in re.findall(r"(\w+) ((?:\d+, )*\d+)(?=[;.])", docstring.split("torchrun: ", 1)[1]):
        found |= {(name, int(number)) for number in numbers.split(", ")}
    return found


@functools.cache
def references() -> dict[str, Ids]:
    return {where: _kept(text) for where, text in _docstrings() if not where.startswith("test_conformance.py")}


TOLD: Ids = {(name, number) for rows in DIFFERENCES.values() for name, numbers in rows.items() for number in numbers}
ALL: Ids = {(name, number) for name, promises in PROMISES.items() for number in promises}


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_kept_by_a_test_or_told_as_a_difference(name: str) -> None:
    kept = set().union(*references().values())
    missing = sorted(number for other, number in ALL - kept - TOLD if other == name)
    assert {number: PROMISES[name][number] for number in missing} == {}


def test_tests_name_promises_that_there_are() -> None:
    assert {where: sorted(ids - ALL) for where, ids in references().items() if not ids or ids - ALL} == {}
    assert TOLD <= ALL


def test_the_differences_are_rows_of_the_docs() -> None:
    page = (ROOT / "docs/differences-from-torchrun.md").read_text()
    rows = set(re.findall(r"^\| (.+?) \|", page, re.MULTILINE))
    assert DIFFERENCES.keys() <= rows
