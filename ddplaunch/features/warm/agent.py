"""Leaves a keeper for the next run (``--keep-warm``). Runs in the agent, as its last act."""

from __future__ import annotations

from ddplaunch.agent.parts import Part


class WarmPart(Part):
    """What a run leaves on this node."""

    def on_run_ended(self) -> None:
        """Start a keeper, if the user wants one."""
        if text := self._node.spec.texts.get("warm"):
            from ddplaunch.features.warm import keeper_start

            keeper_start.leave(self._node.spec, text, self._node.forkserver)


part = WarmPart
