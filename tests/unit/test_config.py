"""Text of an option -> checked value, and the combinations that ``LaunchConfig`` refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddplaunch import rows
from ddplaunch.cli import values
from ddplaunch.errors import USAGE, UsageError
from tests.support import golden
from tests.support.command_lines import changes
from tests.support.configs import launch_config

PARSERS: dict[str, Any] = {
    "--nnodes": lambda text, _: values.parse_nnodes(text),
    "--nproc-per-node": values.parse_nproc,
    "--max-restarts": rows.parse_whole,
    "--tee": values.parse_streams,
    "--ranks-filter": rows.parse_ranks,
    "--signals-to-handle": values.parse_signals,
    "--duplicate-stdout-filters": values.parse_needles,
    "--hang-timeout": rows.parse_seconds,
    "--shutdown-timeout": rows.parse_seconds,
    "--gpus": values.parse_gpus,
    "--preload": values.parse_preload,
    "--rdzv-endpoint": values.parse_endpoint,
    "--rdzv-conf": lambda text, _: values.split_rdzv_conf(text),
}


def test_the_text_of_an_option_is_its_value_or_is_refused_by_its_name() -> None:
    """torchrun: test_run 6, 13; multiprocessing_api_test 1, 16; rendezvous 1, 3."""

    def value(question: str) -> object:
        option, _, text = question.partition("=")
        found = PARSERS[option](text, option)
        return sorted(found) if isinstance(found, frozenset) else found

    golden.check_answers("option_values", value)


def test_a_local_rank_that_is_not_named_has_the_default() -> None:
    """A question is the value of an option like --tee, and a local rank. torchrun: multiprocessing_api_test 2."""

    def covered(question: str) -> str:
        text, local_rank = question.split()
        streams = values.parse_streams(text, "--tee")
        return " ".join(name for name in ("stdout", "stderr") if streams.covers(int(local_rank), name)) or "nothing"

    golden.check_answers("covered_streams", covered)


def test_what_can_be_meant_is_accepted_and_what_cannot_is_refused() -> None:
    """torchrun: shutdown_timeout_test 2."""
    golden.check_answers("settings", lambda text: changes(launch_config(**{"script": "x.py", **json.loads(text)})))


def test_a_run_id_that_is_too_long_for_a_folder_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        launch_config(script="x.py", run_id="ü" * 128)
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("text", ["9" * 5000, f"1:{'9' * 5000}"])
def test_numbers_of_any_length_are_refused_in_a_short_message(text: str) -> None:
    for parse in (values.parse_nnodes, lambda text: values.parse_streams(text, "--tee")):
        with pytest.raises(UsageError) as error:
            parse(text)
        assert len(error.value.message) < 200
