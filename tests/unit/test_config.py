"""Text of an option -> checked value, and the combinations that ``LaunchConfig`` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from ddplaunch.cli import values as values
from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.config import Streams
from ddplaunch.errors import USAGE, UsageError
from tests.support.configs import launch_config


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("2:20", (2, 20)), ("3", (3, 3)), (" 4:4 ", (4, 4))])
def test_nnodes_is_a_number_or_a_range(text: str, nodes: tuple[int, int]) -> None:
    """torchrun: test_run 13."""
    assert values.parse_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["", "a", "2:20:30", "0", "0:1", "3:2", "-1", "1:", ":1", "1.5"])
def test_other_nnodes_are_refused(text: str) -> None:
    """torchrun: test_run 13."""
    with pytest.raises(UsageError, match="--nnodes"):
        values.parse_nnodes(text)


@pytest.mark.parametrize(("text", "value"), [("8", 8), ("auto", "auto"), ("-1", -1)])
def test_nproc_is_a_number_or_a_word(text: str, value: int | str) -> None:
    """torchrun: test_run 6."""
    assert values.parse_nproc(text) == value


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", Streams()),
        ("3", Streams(default=3)),
        ("0:1", Streams(by_local_rank=((0, 1),))),
        ("0:1,1:2,12:3", Streams(by_local_rank=((0, 1), (1, 2), (12, 3)))),
    ],
)
def test_streams_have_torchruns_grammar_with_ranks_of_any_length(text: str, streams: Streams) -> None:
    """torchrun: multiprocessing_api_test 1."""
    assert values.parse_streams(text, "--tee") == streams


@pytest.mark.parametrize("text", ["", "4", "11", "0:1,", "0:1,1", "1,0:1", "0:4", "a:1", "0:1,0:2", "-1"])
def test_other_streams_are_refused(text: str) -> None:
    """torchrun: multiprocessing_api_test 1."""
    with pytest.raises(UsageError, match="--tee"):
        values.parse_streams(text, "--tee")


@pytest.mark.parametrize(
    ("streams", "local_rank", "covered"),
    [
        (Streams(default=3), 5, (True, True)),
        (Streams(default=2), 0, (False, True)),
        (Streams(by_local_rank=((0, 1),)), 0, (True, False)),
        (Streams(by_local_rank=((0, 1),)), 1, (False, False)),
    ],
)
def test_a_local_rank_that_is_not_named_has_the_default(
    streams: Streams, local_rank: int, covered: tuple[bool, bool]
) -> None:
    """torchrun: multiprocessing_api_test 2."""
    assert (streams.covers(local_rank, "stdout"), streams.covers(local_rank, "stderr")) == covered


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("", None), (" ", None), ("0", {0}), ("0,4-7", {0, 4, 5, 6, 7}), (" 1 , 2 ", {1, 2}), ("3-3", {3})],
)
def test_ranks_are_numbers_and_ranges(text: str, ranks: set[int] | None) -> None:
    assert values.parse_ranks(text, "--ranks-filter") == ranks


@pytest.mark.parametrize("text", ["a", "7-4", "-1", "1,,2", ",", "1-", "0-99999999", "9" * 30])
def test_a_filter_that_means_nothing_is_refused_instead_of_showing_all(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks-filter"):
        values.parse_ranks(text, "--ranks-filter")


def test_signals_are_names_in_any_case() -> None:
    assert values.parse_signals("SIGTERM, sigusr1,", "--signals-to-handle") == ("SIGTERM", "SIGUSR1")


@pytest.mark.parametrize("text", ["SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "TERM", "15", "SIGTERM,nope", "", ","])
def test_signals_that_cannot_be_handled_are_refused(text: str) -> None:
    """torchrun: multiprocessing_api_test 16."""
    with pytest.raises(UsageError, match="--signals-to-handle"):
        values.parse_signals(text, "--signals-to-handle")


@pytest.mark.parametrize(
    ("text", "needles"), [("", ()), ("a,b", ("a", "b")), ("a,,b", ("a,b",)), (",,", (",",)), ("x y, z", ("x y", " z"))]
)
def test_two_commas_are_a_comma_in_a_needle(text: str, needles: tuple[str, ...]) -> None:
    assert values.parse_needles(text, "--duplicate-stdout-filters") == needles


@pytest.mark.parametrize("text", ["x", "", "1.5", "0x10"])
def test_a_whole_number_is_asked_for_by_the_options_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-restarts .*whole number"):
        values.parse_whole(text, "--max-restarts")


@pytest.mark.parametrize("text", ["x", "", "nan", "inf", "-inf", "30x", "5m x", "-5m"])
def test_seconds_are_finite_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shutdown-timeout .*number of seconds"):
        values.parse_seconds(text, "--shutdown-timeout")


@pytest.mark.parametrize(
    ("text", "time_s"), [("30", 30.0), ("-1", -1.0), ("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("500ms", 0.5)]
)
def test_times_may_have_units(text: str, time_s: float) -> None:
    assert values.parse_seconds(text, "--hang-timeout") == time_s


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0", ("0",)),
        ("2, 4,7", ("2", "4", "7")),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",)),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_gpus_are_ids_as_cuda_has_them(text: str, gpus: tuple[str, ...]) -> None:
    assert values.parse_gpus(text, "--gpus") == gpus


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0,", "0-3", "1,1", "-1"])
def test_other_gpus_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        values.parse_gpus(text, "--gpus")


@pytest.mark.parametrize(("text", "names"), [("numpy", ("numpy",)), ("a, b.c_1", ("a", "b.c_1"))])
def test_preload_is_names_of_modules(text: str, names: tuple[str, ...]) -> None:
    assert values.parse_preload(text, "--preload") == names


@pytest.mark.parametrize("text", ["", "a,,b", "a-b", "a.", "1a", "a b", "a,a", "os;x"])
def test_other_preloads_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--preload"):
        values.parse_preload(text, "--preload")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1", ("node1", None)),
        ("node1.example.com:29400", ("node1.example.com", 29400)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        (" localhost:65535 ", ("localhost", 65535)),
        ("[2001:db8::1]", ("2001:db8::1", None)),
        ("[2001:db8::1]:29400", ("2001:db8::1", 29400)),
        ("2001:db8::1:29400", ("2001:db8::1", 29400)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(text: str, endpoint: tuple[str, int | None]) -> None:
    """torchrun: rendezvous 3."""
    assert values.parse_endpoint(text, "--rdzv-endpoint") == endpoint


@pytest.mark.parametrize(
    "text",
    ["node1:", "node1:x", "node1:65536", "node1:-1", "node1:123456", ":1", "~:1", "a b:1", "[]:1", "a/b", "[::1]x", ""],
)
def test_other_endpoints_are_refused(text: str) -> None:
    """torchrun: rendezvous 3."""
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        values.parse_endpoint(text, "--rdzv-endpoint")


@pytest.mark.parametrize(
    ("text", "conf"),
    [
        ("", {}),
        ("  ", {}),
        ("timeout=5", {"timeout": "5"}),
        (" join_timeout = 600 , is_host=true", {"join_timeout": "600", "is_host": "true"}),
        ("cert=a=b", {"cert": "a=b"}),
        ("timeout=5,timeout=6", {"timeout": "6"}),
        ("'a=1,timeout=5'", {"a": "1", "timeout": "5"}),
    ],
)
def test_rdzv_conf_is_keys_and_values(text: str, conf: dict[str, str]) -> None:
    """torchrun: rendezvous 1."""
    assert values.split_rdzv_conf(text) == conf


@pytest.mark.parametrize("text", ["=", "timeout", "timeout=", "=5", "timeout=5,", "timeout= ,is_host=1"])
def test_other_rdzv_confs_are_refused(text: str) -> None:
    """torchrun: rendezvous 1."""
    with pytest.raises(UsageError, match="--rdzv-conf"):
        values.split_rdzv_conf(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"nproc_per_node": 0},
        {"nproc_per_node": -1},
        {"nproc_per_node": 1_000_000},
        {"nproc_per_node": "tpu"},
        {"max_nodes": 2},
        {"max_restarts": -1},
        {"shutdown_timeout_s": -1.0},
        {"shutdown_timeout_s": float("nan")},
        {"shutdown_timeout_s": 1e12},
        {"hang_timeout_s": 0.5},
        {"hang_timeout_s": float("nan")},
        {"hang_timeout_s": 1e12},
        {"gpus_per_proc": -1},
        {"master_port": 65536},
        {"script": ""},
        {"virtual_local_rank": True, "gpus_per_proc": 2},
        {"run_id": ""},
        {"run_id": ".."},
        {"run_id": "a/b"},
        {"run_id": "a\n"},
        {"run_id": "ü" * 128},
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any]) -> None:
    """torchrun: shutdown_timeout_test 2."""
    with pytest.raises(UsageError) as caught:
        launch_config(**{"script": "x.py", **fields})
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shutdown_timeout_s": 0.0},
        {"run_id": "job-1.2_a:b@c+d"},
        {"nproc_per_node": "gpu"},
        {"nproc_per_node": MAX_SLOTS_PER_HOST},
        {"master_port": 0},
    ],
)
def test_what_is_unusual_but_can_be_meant_is_accepted(fields: dict[str, Any]) -> None:
    """torchrun: shutdown_timeout_test 2."""
    launch_config(**{"script": "x.py", **fields})


def test_a_dry_run_has_at_most_as_many_nodes_as_one_machine_can_run() -> None:
    with pytest.raises(UsageError, match="--nnodes 257: a dry run has at most 256 nodes, since this machine runs all"):
        launch_config(script="x.py", dry_run=True, min_nodes=257, max_nodes=257)


@pytest.mark.parametrize("text", ["9" * 5000, f"1:{'9' * 5000}"])
def test_numbers_of_any_length_are_refused_in_a_short_message(text: str) -> None:
    for parse in (values.parse_nnodes, lambda text: values.parse_streams(text, "--tee")):
        with pytest.raises(UsageError) as error:
            parse(text)
        assert len(error.value.message) < 200


@pytest.mark.parametrize("text", ["123456", "GPU-a\u0663", "GPU-a_b"])
def test_a_device_that_no_node_accepts_is_refused_here(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        values.parse_gpus(text, "--gpus")
