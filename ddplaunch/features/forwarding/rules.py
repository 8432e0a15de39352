"""Which of the launcher's variables its workers get: all workers those of -x and --env-file.

Workers on other machines, which do not inherit the launcher's environment, also get those that ``RULES`` forwards.

Runs in the user's process, before the launcher starts anything. Pure. The values travel on the agents' stdin, never on
a command line. A test compares the documented table with ``RULES``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from ddplaunch import features
from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.environment import MAY_BE_INHERITED, NAMES
from ddplaunch.text import quote, without_login

When = Literal["always", "requested", "named", "never"]


@dataclass(frozen=True)
class Rule:
    """Whether variables with certain names are forwarded.

    Attributes:
        names: patterns, case-insensitive.
        when: ``always``; ``requested``: if ``-x`` names it or a pattern of ``-x`` matches, or the env file sets it;
            ``named``: if ``-x`` names it, or the env file sets it; ``never``: naming it is an error.
        why: the reason, as documented.
    """

    names: tuple[str, ...]
    when: When
    why: str


_SECRET = Rule(
    (
        *("*TOKEN*", "*KEY*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*CREDENTIAL*", "*AUTHORIZATION*"),
        *("*_PASS", "*_PWD", "*_PAT", "*_AUTH", "*OAUTH*", "*DSN*", "*COOKIE*", "*WEBHOOK*"),
    ),
    "requested",
    "they may be secrets; `-v` masks their values",
)

_OF_SCHEDULERS = tuple(
    dict.fromkeys(name for row in features.items("SCHEDULERS", "tables") for name in row.own_variables)
)

RULES = (
    Rule(tuple(name for name in NAMES if name not in MAY_BE_INHERITED), "never", "ddplaunch sets them for each worker"),
    Rule(
        ("TOKENIZERS_*", "TORCH_COMPILE_*", "TORCHINDUCTOR_*"),
        "always",
        "settings, although some of their names look like secrets",
    ),
    _SECRET,
    Rule(
        ("*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
        "named",
        "devices of this machine; other machines may have other devices",
    ),
    Rule(("*_SOCKET_IFNAME", "UCX_NET_DEVICES"), "named", "network interfaces have other names on other machines"),
    Rule(_OF_SCHEDULERS, "named", "they identify this process as a task of a scheduler or of MPI"),
    Rule(
        (*("HOSTNAME", "HOST", "HOME", "USER", "USERNAME", "LOGNAME", "SHELL", "MAIL"), *("TMPDIR", "TMP", "TEMP")),
        "named",
        "they describe this machine, and the user on it",
    ),
    Rule(
        (
            *("SSH_*", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "KRB5CCNAME"),
            *("TERM", "PWD", "OLDPWD", "SHLVL", "_", "BASH_*"),
        ),
        "named",
        "they describe this terminal, session and shell",
    ),
    Rule(("CUDA_INJECTION*", "WANDB_SERVICE*"), "named", "they point to a profiler or a server on this machine"),
    Rule(
        ("DDPLAUNCH_*", "PET_*", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "named",
        "only the launcher reads them",
    ),
    Rule(("PYTHON*",), "always", "the paths in PYTHONPATH must be valid on all nodes, like the path of the script"),
    Rule(("LD_LIBRARY_PATH",), "always", "the folders must exist on all nodes, like the path of the script"),
    Rule(("TORCH*", "PYTORCH_*", "TRITON_*", "GLOO_*", "KINETO_*"), "always", "settings of PyTorch"),
    Rule(
        ("CUDA_*", "CUBLAS_*", "CUDNN_*", "HIP_*", "HSA_*", "MIOPEN_*", "NVTE_*"),
        "always",
        "settings of GPU libraries",
    ),
    Rule(
        ("NCCL_*", "RCCL_*", "UCX_*", "UCC_*", "FI_*", "OFI_*", "RDMAV_*", "NVSHMEM_*"),
        "always",
        "settings of network libraries, which must be equal on all nodes",
    ),
    Rule(("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "NUMEXPR_*"), "always", "numbers of CPU threads"),
    Rule(
        ("HF_*", "TRANSFORMERS_*", "ACCELERATE_*", "DEEPSPEED_*", "WANDB_*", "MLFLOW_*"),
        "always",
        "caches, offline modes and projects: a node without them would download again, or log to another project",
    ),
    Rule(("*",), "requested", "they may describe only this machine, as PATH does"),
)
"""The first rule that matches a variable's name applies; the last one matches all."""


def rule_of(name: str) -> Rule:
    """The rule that applies to the variable ``name``."""
    upper = name.upper()
    return next(rule for rule in RULES if any(fnmatchcase(upper, pattern) for pattern in rule.names))


def forwarded(environ: Mapping[str, str], requested: Sequence[str], env_file_text: str | None = None) -> dict[str, str]:
    """The variables to forward to workers on other machines.

    ``requested`` overrides the env file, which overrides ``environ``; a later entry overrides an earlier.

    Args:
        environ: the launcher's environment.
        requested: the values of ``-x`` in order: ``NAME``, ``NAME=VALUE``, or a pattern like ``PRE*``. A name that is
            not set and a pattern without match are errors: they may be misspelled.
        env_file_text: the contents of the env file, see ``parse_env_file``.

    Raises:
        UsageError: a name that is not set, a pattern that forwards nothing, an invalid line of the file, or a variable
            that ddplaunch sets itself.
    """
    env = {name: value for name, value in environ.items() if rule_of(name).when == "always"}
    env.update(parse_env_file(env_file_text or ""))
    for text in requested:
        env.update(_requested(text, environ))
    return env


def _requested(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of one ``-x``."""
    name, equals, value = text.partition("=")
    where = f"-x {quote(name)}"
    if equals:
        return _variable(name, value, where)
    if any(character in name for character in "*?["):
        return _matching(name, environ, where)
    if not name:
        raise UsageError("-x: no variable is named", "Write -x NAME, -x NAME=VALUE or -x 'PRE*'.")
    if name not in environ:
        hint = "Export it, or give it a value: -x NAME=VALUE. Repeat -x for several variables."
        raise UsageError(f"{where}: not set where ddplaunch was started", hint)
    _check_free(name, where)
    return {name: environ[name]}


def _matching(pattern: str, environ: Mapping[str, str], where: str) -> dict[str, str]:
    found = sorted(name for name in environ if fnmatchcase(name, pattern))
    if not found:
        raise UsageError(f"{where}: matches no variable that is set where ddplaunch was started", "Is it exported?")
    given = {name: environ[name] for name in found if rule_of(name).when in ("always", "requested")}
    if not given:
        hint = "They belong to this machine, or ddplaunch sets them. To forward one of this machine, name it: -x NAME."
        raise UsageError(f"{where}: matches only {quote(', '.join(found))}, which patterns do not forward", hint)
    return given


def _variable(name: str, value: str, where: str) -> dict[str, str]:
    """The variable, checked."""
    # Messages must not contain the value: it may be a secret.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{where}: a variable's name consists of letters, digits and _, and starts with no digit")
    if "\0" in value:
        raise UsageError(f"{where}: its value contains a null byte, which is not possible in a variable")
    _check_free(name, where)
    return {name: value}


def _check_free(name: str, where: str) -> None:
    if rule_of(name).when == "never":
        hint = f"Leave it out. Its value: {NAMES[name]}." if name in NAMES else "Leave it out."
        raise UsageError(f"{where}: ddplaunch sets {name} itself, for each worker", hint)


def parse_env_file(text: str) -> dict[str, str]:
    """The variables of an env file: lines of ``NAME=VALUE``, optionally after ``export``.

    Nothing is expanded or escaped: ``$`` and backslash are ordinary characters. Spaces around name and value are
    dropped, and so is a comment: a ``#`` at the start of the line or after a space. A value in single or double quotes
    keeps everything between them; only a comment may follow it. Of several lines with one name the last applies.

    Raises:
        UsageError: an invalid line; the message names the line, never a value.
    """
    env: dict[str, str] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--env-file: line {number}"
        name_text, equals, value_text = line.partition("=")
        if not equals:
            raise UsageError(f"{where}: not NAME=VALUE", "To forward a variable with its value here, use -x NAME.")
        name = re.sub(r"^export\s", "", name_text.lstrip()).strip()
        env.update(_variable(name, _value(value_text, where), where))
    return env


def _value(text: str, where: str) -> str:
    quote_mark = text.lstrip()[:1]
    if quote_mark not in ("'", '"'):
        return re.split(r"\s#", text, maxsplit=1)[0].strip()
    # Ends at the first quote that can be the last one: the value may contain quotes.
    quoted = re.fullmatch(rf"{quote_mark}(.*?){quote_mark}(\s+#.*)?", text.strip(), re.DOTALL)
    if not quoted:
        raise UsageError(f"{where}: the value starts with a quote and does not end with one")
    return quoted[1]


def masked_lines(env: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=VALUE`` for the console: sorted, escaped; values of secrets and logins in URLs are masked."""
    return [f"{quote(name)}={_masked(name, env[name])}" for name in sorted(env)]


def _masked(name: str, value: str) -> str:
    if value and rule_of(name) is _SECRET:
        return "***"
    return quote(without_login(value), 1000)
