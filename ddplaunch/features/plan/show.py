"""``--plan``: shows the plan of a run. Runs in the launcher, in place of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.features.plan.page import as_json, page
from ddplaunch.features.plan.plan import plan

if TYPE_CHECKING:
    from ddplaunch.launcher.request import Request


def show(request: Request) -> None:
    """Print the plan: a page, or JSON."""
    planned = plan(features.prepared(request.configure()))
    request.show(as_json(planned) if request.options["json"] else page(planned, is_verbose=request.is_verbose))
