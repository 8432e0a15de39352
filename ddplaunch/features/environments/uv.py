"""Runs uv, which fills an environment. Runs where ``make`` does.

uv gets the files of the launcher in a folder of their own, and with its settings; it ends with this process.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ddplaunch.errors import LaunchError
from ddplaunch.features import mounts
from ddplaunch.features.environments import places
from ddplaunch.features.environments.queries import MAX_PACKAGES, EnvironmentAnswer, MakeEnvironment
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.system import linux
from ddplaunch.text import quote

_SAID_LINES = 12
_OLDEST_PYTHON = (3, 10)

_NOT_FOR_UV = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PYTHON", "UV_SYSTEM_PYTHON")
"""Variables by which uv would use another environment."""


@dataclass(frozen=True)
class Source:
    """What uv works with: the file that names the packages, a folder of wheels or an empty text, its environment."""

    main: str
    wheels: str
    environ: dict[str, str]


def prepare(folder: str, order: MakeEnvironment, wheels: Mapping[str, str], base: str) -> Source:
    """Write the files of ``order`` below ``folder``. ``wheels``: the paths of wheels, by name.

    Raises:
        ValueError: a name leads out of the folder. OSError: no room on the disk.
    """
    places.write(folder, order.files)
    for name, path in wheels.items():
        if "/" in name or name.startswith("."):
            raise ValueError(f"{quote(name)} is no wheel")
        os.makedirs(f"{folder}/.wheels", mode=0o700, exist_ok=True)
        os.symlink(path, f"{folder}/.wheels/{name}")
    return Source(f"{folder}/{order.main}", f"{folder}/.wheels" if wheels else "", _environ(folder, order, base))


def _environ(folder: str, order: MakeEnvironment, base: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_UV} | order.variables
    env["NO_COLOR"] = "1"
    # Python may not write it at the first import: many containers set PYTHONDONTWRITEBYTECODE.
    env.setdefault("UV_COMPILE_BYTECODE", "1")
    home = os.path.expanduser("~")
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    if not base.startswith(f"{home}/") and mounts.is_shared(mounts.mount_of(os.path.realpath(home))[0]):
        env.setdefault("UV_CACHE_DIR", f"{base}/uv")  # On one disk with the environments: their files are links to it.
    if not _is_writable(f"{cache}/uv"):
        env.setdefault("UV_CACHE_DIR", f"{base}/uv")
    if not _is_writable(f"{home}/.local/share/uv"):
        env.setdefault("UV_PYTHON_INSTALL_DIR", f"{base}/python")
    config = env.get("XDG_CONFIG_HOME") or f"{home}/.config"
    if order.settings and not os.path.exists(f"{config}/uv/uv.toml"):
        places.write(f"{folder}/.config", {"uv/uv.toml": order.settings})
        env["XDG_CONFIG_HOME"] = f"{folder}/.config"
    return env


def _is_writable(folder: str) -> bool:
    """Whether files can be made in this folder, or it can be made."""
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK)


def install(
    program: str,
    order: MakeEnvironment,
    folder: str,
    python: str,
    source: Source,
    lock: int,
    tell: Callable[[str], None],
) -> EnvironmentAnswer:
    """Make the environment in ``folder``; ``program`` is uv. ``lock`` is a descriptor that uv keeps open.

    Raises:
        LaunchError: uv has failed, or no worker could run in the environment. OSError: uv cannot be started. What
            ``tell`` raises, which gets the last line of uv.
    """
    environ = {**source.environ, "UV_PROJECT_ENVIRONMENT": folder}
    for arguments in _commands(order, folder, python, source):
        code, said = _run((program, *arguments), os.path.dirname(source.main), environ, lock, tell)
        if code:
            lines = "".join(f"\n    {line}" for line in said)
            raise LaunchError(f"uv {arguments[0]} {first_failure.ended(code)}{lines}")
    return _checked(order, folder)


def _commands(order: MakeEnvironment, folder: str, python: str, source: Source) -> Iterator[tuple[str, ...]]:
    """The arguments of uv, one call after the other."""
    venv = ("venv", "--no-project", "--python", python, folder)
    pip_install = ("pip", "install", "--python", f"{folder}/bin/python")
    only = ("--no-index", "--find-links", source.wheels) if source.wheels else ()
    if os.path.basename(source.main) != "uv.lock":
        yield venv
        yield (*pip_install, "-r", source.main, *only, *order.args)
    elif not source.wheels:
        # The project itself is not installed: its code changes with each edit, and the environment does not.
        yield ("sync", "--frozen", "--no-install-workspace", "--python", python, *order.args)
    else:  # A lock file names the index of each package.
        listed = f"{source.main}.txt"
        yield venv
        yield ("export", "--quiet", "--frozen", "--no-emit-workspace", "--output-file", listed, *order.args)
        yield (*pip_install, "--no-deps", "-r", listed, *only)


def _checked(order: MakeEnvironment, folder: str) -> EnvironmentAnswer:
    packages, version = tuple(sorted(_packages(folder))), _version(folder)
    if version < _OLDEST_PYTHON:
        message = f"the environment has Python {'.'.join(map(str, version))}, and ddplaunch needs 3.10"
        raise LaunchError(message, "UV_PYTHON=3.12 names another version.")
    if order.needs_torch and not any(package.startswith("torch ") for package in packages):
        raise LaunchError(f"{order.main} brings no torch", f"Add torch to {order.main}.")
    return EnvironmentAnswer(python=f"{folder}/bin/python", packages=packages[:MAX_PACKAGES])


def _packages(folder: str) -> Iterator[str]:
    for path in glob.glob(f"{glob.escape(folder)}/lib/python*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(path).removesuffix(".dist-info").partition("-")
        yield quote(f"{name.replace('_', '-').lower()} {version}", 200)


def _version(folder: str) -> tuple[int, ...]:
    """The version of an environment's Python, which is in a file of each environment."""
    with open(f"{folder}/pyvenv.cfg", encoding="utf-8", errors="replace") as file:
        found = re.search(r"^version(?:_info)? *= *(\d+)\.(\d+)", file.read(), re.MULTILINE)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _run(
    command: Sequence[str], cwd: str, env: Mapping[str, str], lock: int, tell: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Run a command: its exit code, and the last lines that it has printed."""
    lines, rest, data = deque[str](maxlen=_SAID_LINES), b"", b""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        preexec_fn=functools.partial(linux.die_with_parent, os.getpid()),
    )
    with process, selectors.DefaultSelector() as selector:
        assert process.stdout
        selector.register(process.stdout, selectors.EVENT_READ)
        try:
            while not selector.select(1.0) or (data := os.read(process.stdout.fileno(), 1 << 16)):
                *whole, rest = (rest + data).split(b"\n")
                lines.extend(filter(None, map(_text, whole)))
                data = b""
                tell(lines[-1] if lines else f"uv {command[1]}")
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
    return process.returncode, [*lines, *filter(None, [_text(rest)])]


def _text(line: bytes) -> str:
    return quote(line.decode("utf-8", "replace").rstrip(), 300)
