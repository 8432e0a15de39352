"""``ddplaunch.launch`` with a function: pickles it for its way to the workers, and reads what it has returned.

Runs in the user's process, in the thread that calls ``launch``. Return values are unpickled, and so run code of whoever
wrote them: only files of this run's workers are read. Must not import torch.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import io
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.cli.python_api import configuration
from ddplaunch.errors import INTERNAL, NODE_LOST, LaunchError, UsageError
from ddplaunch.features.collect_logs.records import RESULT_FILE
from ddplaunch.features.functions import FunctionCall
from ddplaunch.launcher import launch as launcher
from ddplaunch.launcher import setup
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import MAX_TEXT_BYTES
from ddplaunch.protocol.run_result import FunctionResult, RunResult
from ddplaunch.text import quote, ranks, size

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.results import AttemptResult, WorkerExit


_HINT_SHARED = (
    "Give a copy on purpose (tensor.clone(), copy.deepcopy(model)). Workers exchange tensors with torch.distributed."
)

_NOT_FOR_FUNCTIONS = ("module", "no_python", "run_path", "pass_local_rank", "use_env")


def launch(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    stdout_fd: int,
    options: dict[str, Any],
) -> FunctionResult:
    """Have all workers call ``function``; arguments and errors are those of ``ddplaunch.launch``."""
    for name in _NOT_FOR_FUNCTIONS:
        if options.get(name):
            raise UsageError(f"{name}: not for a function")
    config = configuration(source_file(function), (), options)
    if not config.output.keeps_files:
        raise UsageError("--log-dir /dev/null: what a function returns is written to the run folder")
    if config.python:
        raise UsageError("PYTHON_EXEC: a function runs with the interpreter of ddplaunch", "Unset PYTHON_EXEC.")
    text = encoded(function, args, kwargs)
    config = replace(config, entry="function", text=text)
    return with_values(launcher.launch(config, stdout_fd), config)


# Before the run.


def encoded(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """``LaunchConfig.text`` for a function.

    Raises:
        UsageError: it cannot be pickled, or only with cloudpickle, which is not installed; or it is too large.
    """
    data, by_value = _pickled((function, tuple(args), dict(kwargs)), name_of(function))
    if len(data) > MAX_TEXT_BYTES:
        hint = "Write large data to a file, and pass its path."
        raise UsageError(
            f"{name_of(function)} and its arguments take {size(len(data))}, at most {size(MAX_TEXT_BYTES)}", hint
        )
    path, module = _main() if not by_value and _names_main(data) else ("", "")
    call = FunctionCall(
        pickled=base64.b64encode(data).decode(),
        by_value=by_value,
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        main_path=path,
        main_module=module,
        search_path=_own_search_path(),
        argv=tuple(sys.argv),
    )
    return wire.encode(call).decode()


def name_of(function: Callable[..., object]) -> str:
    """The function's name in messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def source_file(function: Any) -> str:
    """The file that defines the function, whose imports its workers need; its name if there is none."""
    function = getattr(function, "func", function)  # A functools.partial
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    path: str = code.co_filename if code else ""
    return os.path.abspath(path) if os.path.isfile(path) else name_of(function)


def _pickled(call: object, name: str) -> tuple[bytes, bool]:
    """The pickle, and whether it is cloudpickle's: plain ones name functions, and workers import their modules."""
    try:
        data = _dumps(pickle.Pickler, call)
        if any(_main()) or not _names_main(data):
            return data, False
        problem = "it is defined in a notebook or an interactive session"
    except UsageError:
        raise
    except Exception as error:  # Depends on the object.
        problem = str(error)
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        hint = "Install cloudpickle, or define the function at the top level of a module."
        raise UsageError(f"{name} or its arguments cannot be sent to workers: {problem}", hint) from None
    try:
        return _dumps(cloudpickle.CloudPickler, call), True
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name} or its arguments cannot be pickled: {error}") from None


def _dumps(pickler: type, call: object) -> bytes:
    """The pickle of ``call`` by a class of picklers.

    Raises:
        UsageError: there is a tensor in shared memory.
    """

    class Checked(pickler):  # type: ignore[misc]
        def persistent_id(self, item: object) -> None:  # Called for every object; None: pickled as usual.
            if _is_shared(item):
                message = (
                    "an argument is a tensor in shared memory (share_memory_), of which each worker would get a copy"
                )
                raise UsageError(message, _HINT_SHARED)

    file = io.BytesIO()
    Checked(file).dump(call)
    return file.getvalue()


def _is_shared(item: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    # Those of a GPU always say that they are shared.
    if not isinstance(item, tensor) or item.device.type != "cpu":
        return False
    try:
        return bool(item.is_shared())
    except Exception:  # A kind of tensor without a storage.
        return False


def _names_main(data: bytes) -> bool:
    """Whether the pickle names something of ``__main__``, or has this text by chance, which does no harm."""
    return b"__main__" in data


def _main() -> tuple[str, str]:
    """Path of the script that this process runs, or name of its module; both empty in an interactive session."""
    main = sys.modules["__main__"]
    if name := getattr(getattr(main, "__spec__", None), "name", ""):
        return "", name
    path = getattr(main, "__file__", None)
    return (os.path.abspath(path), "") if path and os.path.isfile(path) else ("", "")


def _own_search_path() -> tuple[str, ...]:
    """The folders of ``sys.path`` but those of the interpreter, which differ on another machine."""
    known = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    known |= {os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")}
    return tuple(os.path.abspath(path) for path in sys.path if path not in known and not path.endswith(".zip"))


# After the run.


def lost_values(
    last: AttemptResult, run_dir: Path | None, config: LaunchConfig, incomplete: Mapping[str, str]
) -> LaunchError | None:
    """The error of a job that has succeeded, but whose values have not all arrived; None if they have.

    ``incomplete``: by host, why not all of its files were copied. A rank that has ended itself has no value.
    """
    # Where each node has a launcher, this one has the values of its own node only.
    reported = {exit_.rank for exit_ in last.exits}
    unheard = set() if config.each_node_has_launcher else set(range(last.world_size)) - reported
    at_risk = [exit_ for exit_ in last.exits if exit_.host in incomplete]
    uncopied = [exit_ for exit_ in at_risk if not _has_value(run_dir, config, last, exit_)]
    if not unheard and not uncopied:
        return None
    reasons = sorted({incomplete[exit_.host] for exit_ in uncopied})
    reasons += ["their node was lost before it had reported"] if unheard else []
    missing = ranks(sorted(unheard | {exit_.rank for exit_ in uncopied}))
    text = f"the job has succeeded, but what {missing} returned has not arrived: {'; '.join(reasons)}"
    return LaunchError(text, "", NODE_LOST)


def _has_value(run_dir: Path | None, config: LaunchConfig, attempt: AttemptResult, exit_: WorkerExit) -> bool:
    path = _path(run_dir, config, attempt, exit_)
    return path is not None and os.path.exists(path)


def with_values(result: RunResult, config: LaunchConfig) -> FunctionResult:
    """``result`` with what the function has returned.

    Raises:
        LaunchError: a value cannot be read, or not be unpickled in this process.
    """
    values = {}
    if result.outcome == "succeeded":
        for exit_ in result.attempts[-1].exits:
            data = _read(_path(result.run_dir, config, result.attempts[-1], exit_), exit_.rank)
            if data is not None:
                values[exit_.rank] = _unpickled(data, exit_)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(RunResult)}
    return FunctionResult(**fields, return_values=values)


def _path(run_dir: Path | str | None, config: LaunchConfig, attempt: AttemptResult, exit_: WorkerExit) -> Path | None:
    """The file of one worker, which it may not have written; None if no file is its own."""
    names = setup.node_names(config)
    if not run_dir or exit_.host not in names:
        return None
    node = exit_.host if len(names) > 1 or not config.is_local else ""
    local_rank = 0 if config.task else exit_.local_rank
    return Path(run_dir, node, f"attempt_{attempt.attempt}", str(local_rank), RESULT_FILE)


def _read(path: Path | None, rank: int) -> bytes | None:
    """The file of rank ``rank``; None if it has written none.

    Raises:
        LaunchError: it cannot be read.
    """
    try:
        return path.read_bytes() if path else None
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"what rank {rank} returned cannot be read"
        raise LaunchError(
            f"{what}: {path}: {error.strerror}", "The job has succeeded, but its values are lost.", NODE_LOST
        ) from None


def _unpickled(data: bytes, exit_: WorkerExit) -> object:
    # A class of the script is one of __mp_main__ in a worker; multiprocessing does the same.
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    try:
        return pickle.loads(data)
    except Exception as error:
        what = f"what rank {exit_.rank} on {exit_.host} returned cannot be unpickled here"
        raise LaunchError(f"{what}: {quote(f'{type(error).__name__}: {error}', 500)}", "", INTERNAL) from error
