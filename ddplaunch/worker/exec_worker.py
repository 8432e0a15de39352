"""Entry file of a worker that starts in a new interpreter instead of a fork of the forkserver.

``python -u exec_worker.py [-m | --function] script args``. The agent passes the path of
this file: any interpreter can run it. Must only remove its own folder from ``sys.path``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location


def main() -> None:
    """Import the package that contains this file, and have its bootstrap prepare this process.

    ``sys.path`` belongs to the script: with our folder first, a backport in site-packages would hide a module of the
    standard library; with our folder last, the import could find another ddplaunch.
    """
    del sys.path[: not getattr(sys.flags, "safe_path", False)]
    package = os.path.dirname(os.path.dirname(__file__))
    spec = spec_from_file_location("ddplaunch", f"{package}/__init__.py", submodule_search_locations=[package])
    assert spec
    assert spec.loader
    sys.modules["ddplaunch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ddplaunch"])
    from ddplaunch.worker import bootstrap

    if sys.argv[1] == "-m":
        bootstrap.prepare("module", tuple(sys.argv[2:]))
    elif sys.argv[1] == "--function":
        bootstrap.prepare("function", tuple(sys.argv[2:]))
    else:
        bootstrap.prepare("script", tuple(sys.argv[1:]))


if __name__ == "__main__":
    main()
    from ddplaunch.worker.bootstrap import caught, finished, script

    with finished, caught:  # As bootstrap.OUTERMOST has it.
        script()()
