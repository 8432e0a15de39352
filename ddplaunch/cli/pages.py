"""``--page RUN_ID`` and ``--serve [PORT]``: their options, and what they print. Runs in the user's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_PORT = 65535


def command(
    others: Mapping[str, bool], options: dict[str, Any], show: Callable[[str], None], report: Callable[[str], None]
) -> int | None:
    """Take both options out of ``options``. Returns the exit code of the one that was given; None: neither was.

    ``others`` are the other commands, and whether they were given. ``show`` prints a result, ``report`` a message.

    Raises:
        LaunchError: there is no such run, or no page can be made.
    """
    run_id, port = options.pop("page"), options.pop("serve")
    if run_id is None and port is None:
        return None
    name = "--page" if port is None else "--serve"
    both = port is not None and run_id is not None
    if given := [other for other, is_given in {**others, "--page": both}.items() if is_given]:
        raise UsageError(f"{name} cannot be combined with {given[0]}")
    if options["script"]:
        raise UsageError(f"{name}: {options['script']}: no script is run")
    if port is not None:
        from ddplaunch.features.page.serve import serve

        serve(_port(port), options["log_dir"], show, report)
        return 0
    from ddplaunch.features.page.command import page

    page(run_id, options["log_dir"], show)
    return 0


def _port(text: str) -> int:
    """The port of ``--serve``; 0, any free one, if it has none."""
    if text and not (text.isascii() and text.isdigit() and 0 < int(text[:6]) <= _MAX_PORT):
        raise UsageError(f"--serve {text}: not a port", f"A port is a number from 1 to {_MAX_PORT}.")
    return int(text or 0)
