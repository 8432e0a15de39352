"""The list of runs that ``--serve`` shows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from ddplaunch.features.page.render import environment, policy, source

if TYPE_CHECKING:
    from collections.abc import Sequence


def page(runs: Sequence[tuple[str, ...]]) -> str:
    """The list. Each run: the address of its page, then run id, start, duration, result, command and first cause."""
    style = source("page.css")
    template = environment().get_template("index.html.j2")
    return template.render(runs=runs, policy=policy(style), style=Markup(style))
