"""The page of a run: reads a run folder, and writes ``run.html`` into it.

Runs in a child process of the launcher while a run goes on, and in the user's process for ``--page`` and ``--serve``.
Files may be missing, cut off anywhere, damaged, or of another version: what cannot be read is left out, and the page
says so. All text comes from other processes: it is escaped. Must not need the network, nor write anything else.
"""


def rows() -> tuple[object, ...]:
    """``--no-page``, ``--page``, ``--serve``."""
    from ddplaunch.rows import EXISTING_RUNS, Command, Option, flag

    return (
        flag(
            "--no-page",
            "Do not make run.html, the page of the run. Default: it is made.",
            sets="output.page",
            gives=False,
            after="--timestamps",
        ),
        Option(
            "--page",
            "RUN_ID",
            "Make run.html, the page of a run on this machine, and print its path.",
            completes="ddplaunch.features.runs.completion:runs",
            heading=EXISTING_RUNS,
        ),
        Option(
            "--serve",
            "[PORT]",
            "Show the pages of your runs on 127.0.0.1, at this port or at any free one, until Ctrl-C.",
            can_be_bare=True,
            parse=_parse_port,
            heading=EXISTING_RUNS,
        ),
        Command("--serve", run="ddplaunch.features.page.serve:serve"),
        Command("--page", run="ddplaunch.features.page.make:page"),
    )


def _parse_port(text: str, option: str) -> int:
    """A port; 0, any free one, for an empty text.

    Raises:
        OptionError: anything else.
    """
    from ddplaunch.errors import OptionError

    if text and not (text.isascii() and text.isdigit() and 0 < int(text[:6]) <= 65535):
        raise OptionError(option, text, "not a port", "A port is a number from 1 to 65535.")
    return int(text or 0)
