"""Variables of the launcher that its workers get: those of ``-x`` and ``--env-file``, on other machines also settings.

``rules`` says which. Runs in the launcher, before the configuration is built; reads the env file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rows() -> tuple[object, ...]:
    """``--export`` and ``--env-file``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "-x --export",
            "NAME[=VALUE]",
            "Forward a variable to the workers; 'PRE*': all with this prefix.",
            multiple=True,
            after="--hostfile",
        ),
        Option(
            "--env-file",
            "FILE",
            "Forward the variables in FILE to the workers; a NAME=VALUE per line.",
            completes="file",
            after="--hostfile",
        ),
    )


def variables(options: Mapping[str, Any], environ: Mapping[str, str], *, to_hosts: bool) -> dict[str, str]:
    """The variables that the workers get, here and, if there are any, on the hosts.

    Raises:
        UsageError: an invalid name, or an env file that cannot be read.
    """
    if not (to_hosts or options["export"] or options["env_file"]):
        return {}
    from ddplaunch.features.forwarding import rules

    return rules.forwarded(environ, options["export"], _env_file_text(options["env_file"]))


def shown_variables(variables: Mapping[str, str]) -> Sequence[str]:
    """As ``rules.masked_lines``."""
    from ddplaunch.features.forwarding import rules

    return rules.masked_lines(variables)


def _env_file_text(path: str | None) -> str | None:
    from ddplaunch.cluster.hostfile import read_input
    from ddplaunch.errors import OptionError

    if path is None:
        return None
    try:
        return read_input(path).decode()
    except (OSError, ValueError) as error:
        raise OptionError("--env-file", path, getattr(error, "strerror", None) or "is not UTF-8 text") from None
