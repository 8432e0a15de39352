"""Names and text that start a process of ddplaunch and identify an agent, and the folder of the package.

Used by launcher and agent. The launcher starts an agent by the name of its module, which it must not import; ``--ps``
finds agents by these names in their command lines. Must not import another module of ddplaunch: it is loaded first.
"""

from __future__ import annotations

from pathlib import Path

AGENT_MODULE = "ddplaunch.agent.main"
"""The module whose ``main()`` is the agent; it is in the command line of an agent on the launcher's machine."""

START_VARIABLE = "DDPLAUNCH_START"
"""The variable with the Python text that starts an agent on another machine; its name is in the command line."""

PACKAGE_ROOT = str(Path(__file__).parents[2])
"""The folder that contains the package."""

IMPORT_PACKAGE = (
    "import sys; root = sys.argv.pop(1); del sys.path[: not getattr(sys.flags, 'safe_path', False)]; "
    "from importlib import util; spec = util.spec_from_file_location('ddplaunch', root + '/ddplaunch/__init__.py'); "
    "sys.modules['ddplaunch'] = util.module_from_spec(spec); spec.loader.exec_module(sys.modules['ddplaunch'])"
)
"""Begin of a text for ``python -c``: imports ddplaunch from its first argument, ``PACKAGE_ROOT``.

``sys.path`` keeps its order, without the working directory (with PYTHONSAFEPATH it is absent): with the package's
folder first, a backport in site-packages would hide a module of the standard library; with the folder last, the import
could find another ddplaunch than the launcher's.
"""
