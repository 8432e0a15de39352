"""Which variables of the launcher's environment a worker on another machine gets: one table, ``-x``, an env file. Pure.

All of it travels on the agent's stdin, never on a command line. README's table is compared with ``RULES`` by a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from ddplaunch.environ import NAMES
from ddplaunch.errors import UsageError
from ddplaunch.printable import shown as printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

When = Literal["always", "asked", "named", "never"]


@dataclass(frozen=True)
class Rule:
    """What holds for the variables of some names.

    Attributes:
        names: patterns, compared without regard to case.
        when: ``always``; ``asked``: if ``-x`` names it or has a pattern for it, or the env file sets it; ``named``: the
            same without patterns; ``never``: asking for it is an error.
        why: as README says it.
    """

    names: tuple[str, ...]
    when: When
    why: str


_INHERITED = (
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *(name for name in NAMES if name.endswith("_SOCKET_IFNAME")),
)
"""Those of ``NAMES`` that a worker may have from outside."""

_SECRET = Rule(
    ("*TOKEN*", "*KEY*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*CREDENTIAL*"),
    "asked",
    "secrets go only where they were meant to; `-v` masks their values",
)

RULES = (
    Rule(tuple(name for name in NAMES if name not in _INHERITED), "never", "ddplaunch sets them for each worker"),
    Rule(("TOKENIZERS_*", "TORCH_COMPILE_*"), "always", "settings, though some of their names look like secrets"),
    _SECRET,
    Rule(
        ("*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
        "named",
        "devices of this machine; another may have others",
    ),
    Rule(("*_SOCKET_IFNAME", "UCX_NET_DEVICES"), "named", "network interfaces have other names on other machines"),
    Rule(
        ("SLURM*", "SBATCH_*", "SRUN_*", "PBS_*", "LSB_*", "PMI_*", "PMIX_*", "OMPI_*", "PRTE_*"),
        "named",
        "they say which task of a batch system or MPI this process is",
    ),
    Rule(
        (*("HOSTNAME", "HOST", "HOME", "USER", "USERNAME", "LOGNAME", "SHELL", "MAIL"), *("TMPDIR", "TMP", "TEMP")),
        "named",
        "this machine's, and this user's on it",
    ),
    Rule(
        (
            *("SSH_*", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "KRB5CCNAME"),
            *("TERM", "PWD", "OLDPWD", "SHLVL", "_", "BASH_*"),
        ),
        "named",
        "this terminal's, this session's and this shell's",
    ),
    Rule(
        ("CUDA_INJECTION*", "WANDB_SERVICE*"), "named", "they lead to a profiler or a server that runs on this machine"
    ),
    Rule(
        ("DDPLAUNCH_*", "PET_*", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "named",
        "the launcher reads them",
    ),
    Rule(("PYTHON*",), "always", "the paths in PYTHONPATH are taken to be the same on all nodes, as the script's is"),
    Rule(("LD_LIBRARY_PATH",), "always", "libraries are found in the same folders, as the script is"),
    Rule(("TORCH*", "PYTORCH_*", "TRITON_*", "GLOO_*", "KINETO_*"), "always", "settings of PyTorch"),
    Rule(
        ("CUDA_*", "CUBLAS_*", "CUDNN_*", "HIP_*", "HSA_*", "MIOPEN_*", "NVTE_*"),
        "always",
        "settings of the GPUs' libraries",
    ),
    Rule(
        ("NCCL_*", "RCCL_*", "UCX_*", "UCC_*", "FI_*", "OFI_*", "RDMAV_*", "NVSHMEM_*"),
        "always",
        "settings of the network's libraries, which must be the same on all nodes",
    ),
    Rule(("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "NUMEXPR_*"), "always", "threads on the CPUs"),
    Rule(
        ("HF_*", "TRANSFORMERS_*", "ACCELERATE_*", "DEEPSPEED_*", "WANDB_*", "MLFLOW_*"),
        "always",
        "caches, offline modes and projects: a node that lacks them downloads again, or logs elsewhere",
    ),
    Rule(("*",), "asked", "PATH, for one, is each node's own"),
)
"""The first rule that has a variable's name holds; the last one has them all."""

_OPTIONS = {
    "MASTER_ADDR": "--master-addr",
    "MASTER_PORT": "--master-port",
    "ROLE_NAME": "--role",
    "TORCHELASTIC_MAX_RESTARTS": "--max-restarts",
    "TORCHELASTIC_RUN_ID": "--rdzv-id",
    "WORLD_SIZE": "--nnodes with --nproc-per-node",
    "LOCAL_WORLD_SIZE": "--nproc-per-node",
}
"""What decides a variable that cannot be forwarded."""


def rule_of(name: str) -> Rule:
    """The rule that holds for the variable of this name."""
    upper = name.upper()
    return next(rule for rule in RULES if any(fnmatchcase(upper, pattern) for pattern in rule.names))


def forwarded(environ: Mapping[str, str], asked: Sequence[str], env_file_text: str | None = None) -> dict[str, str]:
    """What a worker on another machine has from here, beside what is its machine's own.

    Later entries win over earlier ones, ``asked`` over the env file, and that over what is forwarded by default.

    Args:
        environ: the launcher's environment.
        asked: the values of ``-x`` in their order: ``NAME``, ``NAME=VALUE``, or a pattern like ``PRE*``. Where nothing
            matches a pattern it is an error as with a name: a misspelled ``NCLL_*`` would else cost a day.
        env_file_text: what the env file says, see ``parse_env_file``.

    Raises:
        UsageError: a name that is not set, a pattern that gives nothing, a line of the file that means nothing, or a
            variable that ddplaunch sets itself.
    """
    env = {name: value for name, value in environ.items() if rule_of(name).when == "always"}
    env.update(parse_env_file(env_file_text or ""))
    for text in asked:
        env.update(_asked(text, environ))
    return env


def _asked(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What one ``-x`` gives."""
    name, equals, value = text.partition("=")
    where = f"-x {printable(name)}"
    if equals:
        return _variable(name, value, where)
    if any(character in name for character in "*?["):
        return _matching(name, environ, where)
    if not name:
        raise UsageError("-x: names no variable", "Write -x NAME, -x NAME=VALUE or -x 'PRE*'.")
    if name not in environ:
        hint = "Export it, or give it a value: -x NAME=VALUE. Several variables are several -x."
        raise UsageError(f"{where}: not set where ddplaunch was started", hint)
    _check_free(name, where)
    return {name: environ[name]}


def _matching(pattern: str, environ: Mapping[str, str], where: str) -> dict[str, str]:
    found = sorted(name for name in environ if fnmatchcase(name, pattern))
    if not found:
        raise UsageError(f"{where}: matches nothing that is set where ddplaunch was started", "Is it exported?")
    given = {name: environ[name] for name in found if rule_of(name).when in ("always", "asked")}
    if not given:
        hint = "They are this machine's own, or ddplaunch's. What has to go along all the same needs its name: -x NAME."
        raise UsageError(f"{where}: matches only {printable(', '.join(found))}, which no pattern forwards", hint)
    return given


def _variable(name: str, value: str, where: str) -> dict[str, str]:
    """The variable, if it can be one."""
    # No value in a message: it may be a secret.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{where}: a variable's name is letters, digits and _, no digit first")
    if "\0" in value:
        raise UsageError(f"{where}: its value has a null byte, which no variable can have")
    _check_free(name, where)
    return {name: value}


def _check_free(name: str, where: str) -> None:
    if rule_of(name).when == "never":
        hint = f"{_OPTIONS[name]} decides it." if name in _OPTIONS else "Leave it out."
        raise UsageError(f"{where}: ddplaunch sets {name} for each worker itself", hint)


def parse_env_file(text: str) -> dict[str, str]:
    """The variables of an env file: lines of ``NAME=VALUE``, which may start with ``export``; the last one wins.

    Nothing is expanded and nothing is escaped: no ``$``, no backslash. Spaces around name and value are dropped, and so
    is a comment: a ``#`` that starts the line or follows a space. A value in single or double quotes keeps everything
    between them, and nothing but a comment may follow. A value ends with its line.

    Raises:
        UsageError: anything else; names the line, never a value.
    """
    env: dict[str, str] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--env-file: line {number}"
        left, equals, right = line.partition("=")
        if not equals:
            raise UsageError(f"{where}: not NAME=VALUE", "A variable with the value it has here is given with -x NAME.")
        name = re.sub(r"^export\s", "", left.lstrip()).strip()
        env.update(_variable(name, _value(right, where), where))
    return env


def _value(text: str, where: str) -> str:
    quote = text.lstrip()[:1]
    if quote not in ("'", '"'):
        return re.split(r"\s#", text, maxsplit=1)[0].strip()
    # The first quote that can be the last one: the value itself may have some.
    quoted = re.fullmatch(rf"{quote}(.*?){quote}(\s+#.*)?", text.strip(), re.DOTALL)
    if not quoted:
        raise UsageError(f"{where}: the value starts with a quote and does not end with it")
    return quoted[1]


def shown(env: Mapping[str, str]) -> list[str]:
    """The variables as ``-v`` shows them: sorted, printable, values of secrets and logins in URLs masked."""
    return [f"{printable(name)}={_masked(name, env[name])}" for name in sorted(env)]


def _masked(name: str, value: str) -> str:
    if value and rule_of(name) is _SECRET:
        return "***"
    return printable(re.sub(r"://[^\s/@]+@", "://***@", value), 1000)


_CELLS: dict[When, str] = {"always": "yes", "asked": "`-x NAME`, `-x 'PRE*'`", "named": "`-x NAME`", "never": "no"}


def readme_table() -> str:
    """``RULES`` as README shows them, in Markdown."""
    rows = ["| variable | forwarded | why |", "|---|---|---|"]
    for rule in RULES:
        names = "anything else" if rule.names == ("*",) else ", ".join(f"`{name}`" for name in rule.names)
        rows.append(f"| {names} | {_CELLS[rule.when]} | {rule.why} |")
    return "\n".join(rows)
