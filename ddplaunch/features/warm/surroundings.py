"""What a process gets from the process that starts it and cannot change, and which packages it would import.

A run may use what another run has left only where both are equal. Read in the launcher, or on another machine in the
process that starts there, and in the keeper. Every part is a text; parts are compared, never interpreted.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import site
import sys
from collections.abc import Iterable, Iterator, Mapping

from ddplaunch import version
from ddplaunch.features.schedulers import table as schedulers
from ddplaunch.protocol import environment
from ddplaunch.system import procfs

_STATUS = {
    "user and groups": (b"Uid", b"Gid", b"Groups"),
    "capabilities": (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb", b"NoNewPrivs"),
    "seccomp": (b"Seccomp", b"Seccomp_filters"),
    "CPUs and memory nodes": (b"Cpus_allowed", b"Mems_allowed"),
    "transparent huge pages": (b"THP_enabled",),
}
"""Part -> lines of /proc/thread-self/status."""

_SIGNALS = sum(1 << (signum - 1) for signum in signal.valid_signals())
"""Those that a program can set. libc ignores its own ones in what posix_spawn(3) starts, as Python 3.13 starts most."""

_FILES = {
    "limits": "/proc/self/limits",
    "oom_score_adj": "/proc/self/oom_score_adj",
    "security label": "/proc/self/attr/current",
    "personality": "/proc/self/personality",
    "timer slack": "/proc/self/timerslack_ns",
    "core dump filter": "/proc/self/coredump_filter",
    "login user": "/proc/self/loginuid",
}

_PRIORITY, _NICE, _RT_PRIORITY, _POLICY = 15, 16, 37, 38
"""Positions in the result of ``procfs.stat``."""

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}

_DEFAULT_IOPRIO = ("0", "4", str(2 << 13 | 4))
"""What ioprio_get(2) returns for a process that has set none, before and after its first access to a disk."""

_SESSION_SCOPE = re.compile(r"/session-[^/]+\.scope$")
"""The cgroup of one login: it has no limits of its own unless somebody gave it some."""

_CGROUP_FILES = ("memory.max", "memory.high", "cpu.max", "cpu.weight", "pids.max", "cpuset.cpus.effective", "io.max")

READ_IN_C = (
    *environment.SET_BEFORE_IMPORTS,
    "LD_",
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "GOTO_",
    "GFORTRAN_",
    "NUMEXPR_",
    "NUMPY_",
    "NPY_",
    "ACC_",
    "DNNL_",
    "ONEDNN_",
    "MKLDNN_",
    "KINETO_",
    "I_MPI_",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MALLOC_",
    "TCMALLOC_",
    "MIMALLOC_",
    "GLIBC_",
    "ATEN_",
    "TORCH",
    "PYTORCH",
    "LC_",
    "LANG",
    "TZ",
    "SSL_",
    "OPENSSL_",
    "HOME",
)
"""Begins of variables that are read where it is not noticed: by loaders, libraries and the start of the interpreter.

The first are those that an agent sets for such readers. Those of the libraries are what a ``getenv`` that writes down
its names has seen during the imports of torch and numpy.
"""

_METADATA = (".dist-info", ".egg-info", ".pth", ".egg-link")


def read(environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    """All parts, by name, of this process; those of the packages are digests.

    ``environ`` and ``cwd`` are the agent's environment and working directory.
    """
    return {**_inherited(environ), **_machine(), **_python(environ, cwd)}


def digests(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a comparison, without the values: a digest of each, by name."""
    return {name: _digest((value,)) for name, value in environ.items()}


def visible(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that imports for later runs must have from its start: what ``read`` needs, and ``READ_IN_C``."""
    names = {"PATH", "XDG_STATE_HOME", *(name for row in schedulers.jobs(environ) for name in row.job)}
    return {name: value for name, value in environ.items() if name in names or name.startswith(READ_IN_C)}


def environ_file(environ: Mapping[str, str]) -> int:
    """The descriptor of a file in memory with the environment: only who wants a value has it in its own memory."""
    fd = os.memfd_create("environment", os.MFD_CLOEXEC)
    os.write(fd, b"\0" + b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items()))
    return fd


def read_environ(fd: int) -> dict[str, str]:
    """The environment in an ``environ_file``, which is closed."""
    lines = os.fsdecode(os.pread(fd, os.fstat(fd).st_size, 0)).split("\0")[1:-1]
    os.close(fd)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def first_difference(mine: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The name of the first part that differs; empty if all are equal."""
    return next((name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)), "")


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    status = dict(line.partition(b":")[::2] for line in procfs.read("/proc/thread-self/status").splitlines())
    parts = {name: _joined(status.get(key, b"") for key in keys) for name, keys in _STATUS.items()}
    parts["blocked and ignored signals"] = " ".join(_signals(status.get(key, b"")) for key in (b"SigBlk", b"SigIgn"))
    parts |= {name: _joined([procfs.read(path)]) for name, path in _FILES.items()}
    fields = procfs.stat("self")
    parts["priority"] = _joined(fields[index] for index in (_PRIORITY, _NICE, _RT_PRIORITY, _POLICY))
    priority = _system_call(_IOPRIO_GET, 1, 0)
    parts["I/O priority"] = "" if priority in _DEFAULT_IOPRIO else priority
    parts["memory policy"] = _memory_policy()
    parts["cgroup"] = _cgroup()
    parts["namespaces"] = " ".join(f"{name}={_link(f'/proc/self/ns/{name}')}" for name in _sorted("/proc/self/ns"))
    parts["root folder"] = _identity("/")
    names = [name for row in schedulers.jobs(environ) for name in row.job]
    parts["scheduler's job"] = " ".join(f"{name}={environ.get(name, '')}" for name in names)
    return parts


def _joined(values: Iterable[bytes]) -> str:
    return " ".join(os.fsdecode(b" ".join(value.split())) for value in values)


def _signals(mask: bytes) -> str:
    return f"{int(mask or b'0', 16) & _SIGNALS:x}"


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def _sorted(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _identity(path: str) -> str:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return f"{status.st_dev}:{status.st_ino}"
    return ""


def _system_call(numbers: Mapping[str, int], *args: object) -> str:
    """The result of a system call that has no function in libc; on another processor a text that equals no other."""
    number = numbers.get(os.uname().machine)
    if number is None:
        return f"unknown in process {os.getpid()}"
    return str(ctypes.CDLL(None).syscall(number, *args))


def _memory_policy() -> str:
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    size = ctypes.c_ulong(8 * ctypes.sizeof(nodes))
    result = _system_call(_GET_MEMPOLICY, ctypes.byref(mode), nodes, size, None, ctypes.c_ulong(0))
    return f"{result} {mode.value} {list(nodes)}"


def _cgroup() -> str:
    """The path; that of a login's own scope without its number, but with its limits."""
    lines = os.fsdecode(procfs.read("/proc/self/cgroup")).splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "")
    if not _SESSION_SCOPE.search(path):
        return " ".join(lines)
    limits = (_joined([procfs.read(f"/sys/fs/cgroup{path}/{name}")]) for name in _CGROUP_FILES)
    return " ".join([*(_SESSION_SCOPE.sub("/session", line) for line in lines), *limits])


def _machine() -> dict[str, str]:
    """What a process reads once, when it starts, of what an administrator may change meanwhile."""
    return {
        "time zone": f"{_link('/etc/localtime')} {stamp('/etc/localtime')}",
        "host name": os.uname().nodename,
        "number of CPUs": _joined([procfs.read("/sys/devices/system/cpu/online")]),
        "shared libraries": f"{stamp('/etc/ld.so.cache')} {stamp('/etc/ld.so.preload')}",
    }


def _python(environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    executable = os.path.realpath(sys.executable)
    prefix = (sys.executable, executable, sys.prefix, sys.base_prefix, sys.version, stamp(f"{sys.prefix}/pyvenv.cfg"))
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(":") if not os.path.isabs(folder)]
    return {
        "interpreter": " ".join((*prefix, stamp(executable))),
        "folders of PYTHONPATH": " ".join(os.path.realpath(f"{cwd}/{folder}") for folder in folders if folder),
        "packages": _digest(line for folder in package_folders() for line in _metadata(folder)),
        "ddplaunch": f"{version.__version__} {_digest(_own_files())}",
    }


def package_folders() -> list[str]:
    """The folders into which packages are installed, for all users and for this one."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _metadata(folder: str) -> Iterator[str]:
    """The metadata of the installed packages, and the .pth files, each with time and size."""
    names = _sorted(folder)
    # Not the time of the folder: the first import of a module in it makes __pycache__.
    yield f"{folder} {' '.join(name for name in names if name != '__pycache__')}"
    for name in names:
        if name.endswith(_METADATA):
            path = f"{folder}/{name}"
            details = [stamp(f"{path}/{file}") for file in ("METADATA", "RECORD")] if name.endswith("info") else []
            yield " ".join((name, stamp(path), *details))


def _own_files() -> Iterator[str]:
    root = os.path.dirname(os.path.abspath(version.__file__))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (f"{folder}/{name} {stamp(f'{folder}/{name}')}" for name in sorted(files) if name.endswith(".py"))


def stamp(path: str) -> str:
    """Time and size of a file; ``-`` if there is none. Not its ``st_ctime``: a further hard link changes that (uv)."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return f"{status.st_mtime_ns}:{status.st_size}"
    return "-"


def written_s(path: str) -> float:
    """When a file was written last, in seconds since 1970; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
