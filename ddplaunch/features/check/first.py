"""``--check-first deep``: a run uses only the hosts that pass ``--check --deep``, spares included.

Runs in the command, before the run. What each node can find out alone, it looks at again when it starts (``health``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.cluster.hosts import display_names, fold
from ddplaunch.errors import NODE_NOT_READY, LaunchError, StartNotice, UsageError
from ddplaunch.features.check import check, page, verdicts
from ddplaunch.features.health import passing
from ddplaunch.launcher import setup
from ddplaunch.text import escape, plural, quote

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.check.page import CheckedNode
    from ddplaunch.features.check.queries import NetworkRates

_HINT = "Mend these hosts, or name others; `ddplaunch --check --deep` shows all that is found."


def check_supported(config: LaunchConfig) -> None:
    """Raises UsageError where no launcher starts agents on all nodes."""
    if config.each_node_has_launcher or config.task:
        message = "--check-first deep: one launcher must start agents on all nodes"
        raise UsageError(message, "Name them with --hosts or --hostfile, or use --check-first quick.")


def at_start(config: LaunchConfig) -> LaunchConfig:
    """``config`` with the hosts that pass, in their order, and notices about the others.

    Raises:
        LaunchError: too few pass, or the jobs that measure them fail.
    """
    names, checked = setup.node_names(config), _without_script(config)
    report = _print if config.output.verbosity >= 0 else (lambda _: None)
    report(f"checking {fold(names)}")
    nodes, failures = check.inspect(checked)
    failed = {failure.host: f"{failure.host}: {failure.message.splitlines()[0]}" for failure in failures}
    failed |= verdicts.failed(nodes, config.health, needs_torch=config.entry != "program")
    told = ""
    if len(nodes := _rest(nodes, failed)) >= config.min_nodes:
        rates = check.network_rates(checked, nodes)
        nodes, told = check.with_rates(nodes, rates), _told(rates, nodes)
        has_gpus = any(node.report.gpus for node in nodes)
        failed |= verdicts.slow(nodes, check.gpu_rates(checked, nodes, report) if has_gpus else ())
    return _with_hosts(config, [node.host for node in _rest(nodes, failed)], failed, told)


def _without_script(config: LaunchConfig) -> LaunchConfig:
    """What is checked: with the Python environment; and where hosts get the script only later, without it."""
    own = {"script": f"{__package__}.worker_network", "entry": "module", "text": "", "chdir": "~"}
    config = replace(config, **own) if config.sync else config  # type: ignore[arg-type]
    return features.at_start(replace(config, check_first=None, sync=False, snapshot=False, code=None))


def _rest(nodes: Sequence[CheckedNode], failed: Mapping[str, str]) -> list[CheckedNode]:
    """Those that have not failed; what they know of others that have does not matter."""
    return [
        replace(node, unreachable=tuple(pair for pair in node.unreachable if pair[0] not in failed))
        for node in nodes
        if node.host not in failed
    ]


def _told(rates: NetworkRates, nodes: Sequence[CheckedNode]) -> str:
    return f"; {page.all_reduce(rates.all_reduce, rates.backend, nodes)}" if len(nodes) > 1 else ""


def _check_enough(needed: int, found: int, failed: Mapping[str, str]) -> None:
    if found < needed:
        table = "\n".join(f"  {quote(line, 500)}" for line in failed.values())
        have = f"{plural(needed, 'node')} {'is' if needed == 1 else 'are'} needed, and {found} can be used"
        raise LaunchError(f"the check was not passed; {have}\n{table}", _HINT, NODE_NOT_READY)


def _with_hosts(config: LaunchConfig, names: Sequence[str], failed: Mapping[str, str], told: str) -> LaunchConfig:
    notices = [StartNotice("info", f"not used: {quote(line, 500)}") for line in failed.values()]
    if (path := config.passing_hosts_file) and (problem := passing.written(path, config, names)):
        notices.append(StartNotice("warning", passing.not_written(config, problem)))
    _check_enough(config.min_nodes, len(names), failed)
    passes = f"all {plural(len(names), 'host')} pass" if len(names) > 1 else f"{names[0]} passes"
    notices.append(StartNotice("info", f"{passes.removeprefix('all ') if failed else passes} the check{told}"))
    named = zip(display_names(config.hosts), config.hosts, strict=True)
    hosts = tuple(host for name, host in named if name in names)
    return replace(config, hosts=hosts, passing_hosts_file=None, notices=(*config.notices, *notices))


def _print(text: str) -> None:
    """This command has no console yet."""
    if sys.stderr:
        sys.stderr.write(f"ddplaunch: {escape(text)}\n")
