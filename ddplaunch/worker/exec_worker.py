"""Run as a file by a fresh interpreter: ``python -u exec_worker.py [-m] script args``; the exec'd worker's start."""

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

    if sys.argv[1] == "-m":
        bootstrap.run("module", tuple(sys.argv[2:]))
    else:
        bootstrap.run("script", tuple(sys.argv[1:]))


if __name__ == "__main__":
    main()
