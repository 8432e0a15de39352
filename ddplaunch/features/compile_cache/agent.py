"""Deletes what was not used for long from the compile caches of this node. Runs in a thread of the agent."""

from __future__ import annotations

import contextlib
import os
import time

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.compile_cache import folder
from ddplaunch.threads import in_thread


class CompileCachePart(Part):
    """Cleans once in a run, when workers run: nobody waits for that."""

    _is_due = True

    def on_started(self) -> None:
        """As ``Part.on_started``."""
        spec, is_due, self._is_due = self._node.spec, self._is_due, False
        if is_due and not spec.dry_run and spec.workers.compile_cache != "off" and (base := folder.chosen(os.environ)):
            with contextlib.suppress(RuntimeError):  # No room for a thread.
                in_thread("compile cache", lambda: folder.clean(base, time.time()))


def part(node: NodeServices) -> CompileCachePart:
    """The part of an agent."""
    return CompileCachePart(node)
