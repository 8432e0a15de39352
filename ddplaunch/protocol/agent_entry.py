"""Names and text that start a process of ddplaunch and identify an agent, and the folder of the package.

Used by launcher and agent. The launcher starts an agent by the name of its module, which it must not import; ``--ps``
finds agents and keepers by what is in their command lines. Must not import another module of ddplaunch: it is loaded
first.
"""

from __future__ import annotations

import os

AGENT_MODULE = "ddplaunch.agent.main"
"""The module whose ``main()`` is the agent; it is in the command line of an agent on the launcher's machine."""

START_VARIABLE = "DDPLAUNCH_START"
"""The variable with the Python text that starts an agent on another machine; its name is in the command line."""

KEEPER_COMMAND = ("ddplaunch", "keeper")
"""Begin of a keeper's command line in ps."""

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder that contains the package."""

TEXT_FD = 3
"""Descriptor of a worker with the text of its program (``Program.text``)."""

MAX_TEXT_BYTES = 16 << 20
"""Limit of that text: one record has it (see ``wire.MAX_LINE_BYTES``)."""

MAX_MESSAGE_CHARS = 20_000
MAX_TRACEBACK_CHARS = 200_000
"""Limits of an exception in a worker's error file, for who writes it and for who reads it."""

COLLECT_AFTER = 10_000
COLLECT_SELDOM = f"import gc; gc.set_threshold({COLLECT_AFTER})"
"""Text that makes Python look for circles of garbage after so many new objects, not 700. Valid from Python 2.7 on.

At the start of the launcher and of an agent, whose imports make many objects and no garbage. Not in a forkserver:
workers have Python's own threshold.
"""

DROP_FIRST_PATH = "import os, sys; del sys.path[: not getattr(sys.flags, 'safe_path', False)]"
"""Text that removes the folder that ``python -c`` and ``python -m`` put first; with PYTHONSAFEPATH there is none."""

STANDARD_LIBRARY_FIRST = (
    "sys.path.sort(key=lambda path: path != os.path.dirname(os.__file__) and not path.endswith('lib-dynload'))"
)
"""Text that moves the standard library before the folders of PYTHONPATH. Valid from Python 2.7 on.

A process of ddplaunch does not import the ``queue.py`` of a project in PYTHONPATH; workers see Python's own order.
"""

LOAD_PACKAGE = (
    "from importlib import util; spec = util.spec_from_file_location('ddplaunch', root + '/ddplaunch/__init__.py'); "
    "sys.modules['ddplaunch'] = util.module_from_spec(spec); spec.loader.exec_module(sys.modules['ddplaunch'])"
)
"""Text that imports ddplaunch from the folder ``root``, whichever is installed."""

IMPORT_PACKAGE = (
    f"{DROP_FIRST_PATH}; root = sys.argv.pop(1); search_path = sys.path[:]; {STANDARD_LIBRARY_FIRST}; {LOAD_PACKAGE}"
)
"""Begin of a text for ``python -c``: imports ddplaunch from its first argument, ``PACKAGE_ROOT``.

The package's folder does not enter ``sys.path``: there first, a backport in site-packages would hide a module of the
standard library; there last, the import could find another ddplaunch than the launcher's. ``search_path`` is the path
in Python's own order.
"""


def use_own_search_path(*, drop_first: bool) -> None:
    """Put the standard library first in ``sys.path``; with ``drop_first`` remove what Python put first for ``-m``."""
    exec(f"{DROP_FIRST_PATH if drop_first else 'import os, sys'}; {STANDARD_LIBRARY_FIRST}", {})


def is_own_module(name: str) -> bool:
    """Whether workers that run the module ``name`` run code of ddplaunch, which needs no folder of the user."""
    return name.startswith("ddplaunch.")
