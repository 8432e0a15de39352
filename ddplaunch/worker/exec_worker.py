"""Run as a file by a fresh interpreter, as an exec'd worker's start.

``python -u exec_worker.py [--rehearse=GPUS,COMPILES] [-m] script args``
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location


def main() -> None:
    """Hand over to the bootstrap of the package this file is in.

    ``sys.path`` is the script's and stays as it is: with our folder first, a backport in site-packages would hide the
    standard library's module; with it last, we could meet another ddplaunch.
    """
    package = __file__.removesuffix("/worker/exec_worker.py")
    spec = spec_from_file_location("ddplaunch", f"{package}/__init__.py", submodule_search_locations=[package])
    assert spec
    assert spec.loader
    sys.modules["ddplaunch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ddplaunch"])
    from ddplaunch.worker import bootstrap

    rehearsal = None
    if sys.argv[1].startswith("--rehearse="):
        from ddplaunch.config import Rehearsal

        gpus, compiles = sys.argv.pop(1).removeprefix("--rehearse=").split(",")
        rehearsal = Rehearsal(int(gpus), compiles == "1")
    if sys.argv[1] == "-m":
        bootstrap.run("module", tuple(sys.argv[2:]), rehearsal)
    else:
        bootstrap.run("script", tuple(sys.argv[1:]), rehearsal)


if __name__ == "__main__":
    main()
