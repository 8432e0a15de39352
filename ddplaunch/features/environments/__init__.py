"""Python environments that are made for a run, ``--env``: on each host once, by uv, and kept for later runs.

The command reads the file that names the packages (``choice``) and asks for the environment here, or on all hosts
(``hosts``). ``make`` makes it, under a lock, in a folder of the user that is named by all that determines it
(``places``). The run's agents, and so its workers, run with its Python. Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--env``, ``--env-args``, ``--env-wheels`` and ``--env-dir``."""
    from ddplaunch.rows import Condition, Option

    only = (Condition("with --env FILE", lambda config: config.env not in (None, "", "pack")),)
    by_variable = (Condition("with --env", lambda config: bool(config.env), is_error=False),)
    return (
        Option(
            "--env",
            "FILE",
            "Have uv make the Python environment of a uv.lock, pyproject.toml or requirements.txt, once on each host, "
            "and run there with it. pack: copy the launcher's own environment to the same path on the hosts.",
            sets="env",
            variable="DDPLAUNCH_ENV",
            completes="file",
            heading="Workers",
        ),
        Option(
            "--env-args",
            "TEXT",
            "With --env: more arguments for uv, like '--extra cu128'.",
            sets="env_args",
            only=only,
            heading="Workers",
        ),
        Option(
            "--env-wheels",
            "DIR",
            "With --env: install from the wheels in this folder only; hosts get those that they do not have.",
            sets="env_wheels",
            only=only,
            completes="folder",
            heading="Workers",
        ),
        Option(
            "--env-dir",
            "DIR",
            "With --env: folder for environments on each host. Default: ~/.cache, or /var/tmp if that is shared.",
            sets="env_dir",
            variable="DDPLAUNCH_ENV_DIR",
            only=by_variable,
            completes="folder",
            heading="Workers",
        ),
    )


def at_start(config: LaunchConfig) -> LaunchConfig:
    """As ``choice.at_start``."""
    from ddplaunch.features.environments.choice import at_start

    return at_start(config)


def for_agent(config: LaunchConfig) -> str | None:
    """For ``--env pack``: the environment, whose programs workers find. None: agents know it themselves."""
    return "pack" if config.env == "pack" else None
