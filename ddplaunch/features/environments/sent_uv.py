"""The launcher's uv, which hosts without one get, and its settings. Runs in the process of the command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from importlib import import_module

from ddplaunch.system.files import kept_files

_OWN_PLACES = re.compile(
    r"UV|UV_(CACHE_DIR|CREDENTIALS_DIR|CONFIG_FILE|ENV_FILE|INSTALL_DIR|INTERNAL_.*|PROJECT|PROJECT_ENVIRONMENT"
    r"|PUBLISH_.*|PYTHON|PYTHON_BIN_DIR|PYTHON_CACHE_DIR|PYTHON_INSTALL_DIR|PYTHON_SEARCH_PATH|RUN_.*|SYSTEM_PYTHON"
    r"|TEST_.*|TOOL_.*|UNMANAGED_INSTALL|VENV_.*|WORKING_DIR|WORKING_DIRECTORY)"
)
"""Variables of uv that say where things are on this machine, or what else uv is to do here: hosts do not get them."""


def variables() -> dict[str, str]:
    """The settings of uv in the environment of this process that hosts get."""
    return {
        name: value for name, value in os.environ.items() if re.match("UV_", name) and not _OWN_PLACES.fullmatch(name)
    }


def own_uv() -> str:
    """The uv of this machine: in PATH, or of the package of this name; empty: there is none that can be sent."""
    found = [shutil.which("uv") or ""]
    with contextlib.suppress(ImportError, OSError):  # Not installed, or without the program.
        found.append(str(import_module("uv").find_uv_bin()))
    return next((os.path.realpath(path) for path in found if path and _is_program(path)), "")


def _is_program(path: str) -> bool:
    """Whether it is no script, as those that choose one of several versions."""
    with contextlib.suppress(OSError), kept_files.open_regular(path) as file:
        return file.read(4) == b"\x7fELF"
    return False
