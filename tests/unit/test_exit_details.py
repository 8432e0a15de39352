"""What a worker has recorded of its end is read in every form that torch has given it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.agent.workers.exit_details import read_error_file


@pytest.mark.parametrize("time", [10, "10"])
def test_both_forms_are_read_whatever_their_time_is(time: object, tmp_path: Path):
    """torchrun: errors_api_test 2."""
    details = {"py_callstack": "Traceback: here", "timestamp": time}
    assert read(tmp_path, {"message": "no luck", "timestamp": time}) == ("no luck", "")
    assert read(tmp_path, {"message": {"message": "no", "extraInfo": details}}) == ("no", "Traceback: here")
    assert read(tmp_path, {"message": {"message": "no", "errorCode": 7, "extraInfo": details}})[0] == "no"


def read(folder: Path, body: dict[str, Any]) -> tuple[str, str]:
    path = folder / "error.json"
    path.write_text(json.dumps(body))
    found = read_error_file(path)
    assert found is not None
    return found.message, found.traceback
