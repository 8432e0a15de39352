"""Prints as one JSON object all that a script can see of its process and interpreter at its start.

With the argument ``torch`` it imports torch first. ``stdin`` adds what can be read from there.
"""

# ruff: noqa: E402
_names = sorted(dir())
_main = dict(globals())

import sys

if "torch" in sys.argv:
    __import__("torch")

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import inspect
import io
import json
import locale
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import site
import stat
import threading
import time
import traceback
import warnings


def describe(value: object) -> object:
    """A value JSON can hold: simple ones as they are, others by their type, so that addresses do not matter."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return f"{type(value).__module__}.{type(value).__qualname__}"


def main_module() -> dict[str, object]:
    values = {name: describe(value) for name, value in _main.items() if name not in ("_names", "_main")}
    return {
        **values,
        "names": _names,
        "is __main__ in sys.modules": sys.modules["__main__"].__dict__ is globals(),
        "loader's path": getattr(__loader__, "path", None),
        "spec's name": getattr(__spec__, "name", None),
        "builtins": __builtins__ is builtins,
        "source": inspect.getsource(describe).splitlines()[0],
        "pickled": pickle.dumps(describe, 0).decode(),
        "frames below": [frame.name for frame in traceback.extract_stack()[:-2]],
    }


def interpreter() -> dict[str, object]:
    hooks = ("displayhook", "excepthook", "unraisablehook", "breakpointhook")
    plain = (
        *(
            "argv",
            "orig_argv",
            "path",
            "executable",
            "prefix",
            "base_prefix",
            "exec_prefix",
            "warnoptions",
            "hexversion",
        ),
        *("dont_write_bytecode", "pycache_prefix", "platform", "float_repr_style", "maxsize"),
    )
    return {
        **{name: getattr(sys, name) for name in plain},
        **{name: getattr(sys, name) is getattr(sys, f"__{name}__") for name in hooks},
        "threading.excepthook": threading.excepthook is threading.__excepthook__,
        "flags": {
            name: getattr(sys.flags, name)
            for name in dir(sys.flags)
            if not name.startswith(("_", "n_", "count", "index"))
        },
        "_xoptions": sys._xoptions,
        "folder of multiprocessing": multiprocessing.process.ORIGINAL_DIR,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "digits limit": sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None,
        "trace and profile": [sys.gettrace(), sys.getprofile()],
        "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding()],
        "leftovers": [
            name for name in ("last_type", "last_value", "last_traceback", "last_exc", "ps1") if hasattr(sys, name)
        ],
        "meta path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "path hooks": len(sys.path_hooks),
        "warning filters": [describe(item) for item in warnings.filters],
        "warnings are shown by": warnings.showwarning.__module__,
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)],
        "gc frozen": gc.get_freeze_count() > 0,
        "builtins": sorted(dir(builtins)),
        "user site": [site.ENABLE_USER_SITE, site.getusersitepackages()],
        "faulthandler": faulthandler.is_enabled(),
        "root logger": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "log levels": [logging.getLogger(name).level for name in ("", "mine")],
        "multiprocessing": [
            multiprocessing.current_process().name,
            multiprocessing.parent_process(),
            multiprocessing.get_start_method(allow_none=True),
            len(multiprocessing.active_children()),
        ],
    }


def streams() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        binary = stream.buffer
        raw = getattr(binary, "raw", binary)
        found[name] = {
            **{a: describe(getattr(stream, a)) for a in ("name", "mode", "encoding", "errors", "newlines", "closed")},
            **{a: getattr(stream, a) for a in ("line_buffering", "write_through")},
            **{a: getattr(stream, a)() for a in ("fileno", "isatty", "readable", "writable", "seekable")},
            "types": [describe(part) for part in (stream, binary, raw)],
            "raw": [raw.mode, raw.closefd, raw.seekable(), raw.name],
            "original": stream is getattr(sys, f"__{name}__"),
            "kind": kind_of(stream.fileno()),
            "open mode": os.get_blocking(stream.fileno()),
        }
    return found


def kind_of(fd: int) -> str:
    mode = os.fstat(fd).st_mode
    names = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(mode), oct(stat.S_IFMT(mode)))


def status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    wanted = (
        "Umask",
        "Threads",
        "Sig",
        "Shd",
        "Cap",
        "NoNewPrivs",
        "Seccomp",
        "Cpus_allowed",
        "Uid",
        "Gid",
        "Groups",
        "CoreDumping",
    )
    return {name: value.strip() for name, value in lines.items() if name.startswith(wanted) and name != "SigQ"}


def read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().strip()
    return ""


def prctl(option: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, 0, 0, 0, 0))


def prctl_int(option: int) -> int:
    value = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def children() -> str:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return "none"
    return "some"


def process() -> dict[str, object]:
    pid = os.getpid()
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")}
    handlers = {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()}
    return {
        "status": status(),
        "limits": limits,
        "signals": {name: h if "built-in" not in h else "default_int_handler" for name, h in handlers.items()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timers": [signal.getitimer(which) for which in (0, 1, 2)],
        "wakeup fd": signal.set_wakeup_fd(-1),
        "descriptors": {
            fd: kind_of(int(fd)) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        },
        "command line": read("/proc/self/cmdline").split("\0"),
        "name": read("/proc/self/comm"),
        "executable": os.readlink("/proc/self/exe"),
        "leads its session": [os.getsid(0) == pid, os.getpgrp() == pid],
        "terminal": read("/proc/self/stat").rpartition(")")[2].split()[4],
        "nice": [os.nice(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom": [read("/proc/self/oom_score_adj"), read("/proc/self/coredump_filter"), read("/proc/self/personality")],
        "cgroup": read("/proc/self/cgroup"),
        "cwd": os.getcwd(),
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "main thread": [
            threading.main_thread().name,
            threading.main_thread().ident == threading.get_ident(),
            threading.main_thread().native_id == pid,
            threading.get_native_id() == pid,
        ],
        "children": children(),
        "dumpable": prctl(3),
        "subreaper": prctl_int(37),
        "dies with its parent": prctl_int(2),
        "environ": dict(os.environ),
        "environ of C": {name: ctypes_getenv(name) for name in ("PATH", "RANK", "LOCAL_RANK", "DDPLAUNCH_RUN_ID")},
        "initial environ": sorted(line.partition("=")[0] for line in read("/proc/self/environ").split("\0") if line),
        "pid": [multiprocessing.current_process().pid == pid, os.getppid() > 0],
    }


def ctypes_getenv(name: str) -> str:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return (libc.getenv(name.encode()) or b"").decode()


def torch_state() -> dict[str, object]:
    import torch.distributed

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": [torch.cuda.is_initialized(), torch.cuda.is_available()],
        "distributed": [torch.distributed.is_initialized(), torch.distributed.is_torchelastic_launched()],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "generator is seeded": torch.initial_seed() == torch.default_generator.initial_seed(),
    }


def place() -> dict[str, object]:
    return {
        "locale": [
            locale.setlocale(getattr(locale, name))
            for name in dir(locale)
            if name.startswith("LC_") and name != "LC_ALL"
        ],
        "preferred encoding": [locale.getpreferredencoding(False), io.TextIOWrapper(io.BytesIO()).encoding],
        "time zone": [time.tzname, time.timezone],
    }


if __name__ == "__main__":
    report: dict[str, object] = {
        "__main__": main_module(),
        "sys": interpreter(),
        "streams": streams(),
        "process": process(),
        "place": place(),
    }
    if "torch" in sys.argv:
        report["torch"] = torch_state()
    if "stdin" in sys.argv:
        report["stdin"] = sys.stdin.read()
    print(json.dumps(report, sort_keys=True))
