"""Options about the workers of a run: their number, their devices, how they are started, restarted and stopped."""

from __future__ import annotations

from typing import get_args

from ddplaunch.cli import values
from ddplaunch.config import LaunchConfig, NumaBinding
from ddplaunch.rows import PYTHON, REAL_RUN, Option, flag

_STOP_SIGNALS = ",".join(LaunchConfig.signals)

WORKERS = (
    Option(
        "--nproc-per-node",
        "N",
        "Workers per node: a number, gpu, xpu, cpu (one per CPU), or auto (gpu, else cpu). Default: gpu, else 1.",
        pet=True,
        short="workers per node; default: one per GPU, or one",
        sets="workers.nproc_per_node",
        parse=values.parse_nproc,
        completes=("gpu", "xpu", "cpu", "auto"),
    ),
    flag("-m --module", "SCRIPT is a module; run it as 'python -m' does.", pet=True),
    flag("--no-python", "SCRIPT is a program; execute it directly.", pet=True),
    flag("--run-path", "SCRIPT is a script, even with -m or --no-python.", pet=True),
    Option(
        "--start-method",
        "METHOD",
        "forkserver, fork: import torch once, then fork; spawn: an interpreter per worker. Default: forkserver.",
        pet=True,
        choices=("forkserver", "spawn", "fork"),
        sets="workers.start_method",
        parse=values.parse_start_method,
    ),
    Option(
        "--preload",
        "A,B",
        "Modules to import before forking, besides torch.",
        sets="workers.preload",
        parse=values.parse_preload,
    ),
    Option(
        "--keep-warm",
        "TIME",
        "Leave torch and --preload imported for the next run, for this time; 0: use nothing that is left.",
        short="leave torch imported for the next run, like 10m",
        sets="keep_warm_s",
        parse=values.parse_seconds,
        variable="DDPLAUNCH_KEEP_WARM",
        only=(REAL_RUN,),
        feature="warm",
    ),
    flag(
        "--pass-local-rank",
        "Give the script --local-rank=N, for old torch.distributed.launch scripts.",
        sets="workers.pass_local_rank",
    ),
    flag("--use-env", "Option of torch.distributed.launch; has no effect.", hidden=True),
    Option(
        "--role",
        "NAME",
        "The workers' ROLE_NAME. Default: default.",
        pet=True,
        sets="workers.role",
        parse=lambda text, _: text,
    ),
)

DEVICES = (
    Option(
        "--gpus",
        "2,4,7",
        "GPUs to use. Default: CUDA_VISIBLE_DEVICES, or all.",
        short="GPUs to use; default: all",
        sets="workers.gpus",
        parse=values.parse_gpus,
    ),
    Option(
        "--gpus-per-proc",
        "K",
        "Each worker sees K GPUs of the node. Default: all.",
        sets="workers.gpus_per_proc",
        parse=values.parse_whole,
    ),
    flag(
        "--virtual-local-rank",
        "Each worker sees one GPU, with LOCAL_RANK=0.",
        pet=True,
        sets="workers.virtual_local_rank",
    ),
    Option(
        "--numa-binding",
        "HOW",
        "Bind workers to CPUs near their GPU: node, socket, exclusive or core-complex. Default: no binding.",
        choices=get_args(NumaBinding),
        sets="workers.numa_binding",
        only=(REAL_RUN,),
    ),
)

RESTARTS_AND_STOPPING = (
    Option(
        "--max-restarts",
        "N",
        "After a failure start all workers again, at most N times. Default: 0.",
        pet=True,
        short="after a failure start again, at most N times",
        sets="max_restarts",
        parse=values.parse_whole,
    ),
    Option(
        "--shutdown-timeout",
        "TIME",
        "Time from SIGTERM to SIGKILL, like 90, 90s or 5m; a stop takes at most about 10 s more. Default: 30 s.",
        pet=True,
        sets="timeouts.shutdown_timeout_s",
        parse=values.parse_seconds,
        variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    Option(
        "--hang-timeout",
        "TIME",
        "The job counts as failed when nothing has moved on any node for this time, like 90 or 5m: no output, no "
        "collective, no CPU time, nothing read or written. Default: never.",
        short="the job fails if nothing moves for so long",
        sets="timeouts.hang_timeout_s",
        parse=values.parse_seconds,
        feature="hangs",
    ),
    Option(
        "--busy-timeout",
        "TIME",
        "As --hang-timeout, but only output and collectives count as movement: also ends a rank that computes for "
        "ever. Default: never.",
        sets="timeouts.busy_timeout_s",
        parse=values.parse_seconds,
        feature="hangs",
    ),
    Option(
        "--hang-report",
        "TIME|off",
        "When nothing has moved for this time, show which ranks wait for whom, and write hang.txt; the job goes "
        "on. Default: 5m, or ten times the longest pause of the run if that is more.",
        sets="timeouts.hang_report_s",
        parse=values.parse_hang_report,
        completes=("off",),
        feature="hangs",
    ),
    flag(
        "--debug-on-error",
        "The first rank that raises an exception stops in pdb (post-mortem) before the job ends. Needs a terminal. "
        "breakpoint() works without any option.",
        sets="workers.debug_on_error",
        only=(PYTHON,),
        feature="debug",
    ),
    Option(
        "--debug-ranks",
        "0,4-7",
        "Only these ranks stop in a debugger, by breakpoint() or --debug-on-error; the others go on. Default: all.",
        sets="workers.debug_ranks",
        parse=values.parse_ranks,
        only=(PYTHON,),
        feature="debug",
    ),
    Option(
        "--health",
        "off|warn|refuse",
        "Before the start, look at the GPUs, disks and clock of every node. refuse: a node with a fault is not "
        "used; warn: faults are only shown; off: nothing is looked at. Default: refuse.",
        sets="health",
        parse=values.parse_health,
        feature="health",
    ),
    Option(
        "--signals-to-handle",
        "NAMES",
        f"Signals that stop the job. Default: {_STOP_SIGNALS}.",
        pet=True,
        sets="signals",
        parse=values.parse_signals,
    ),
    Option(
        "--requeue-on",
        "USR1,TERM",
        "In a SLURM job these signals also stop the run, and SLURM then requeues the job. Default: none.",
        "",
        feature="requeue",
    ),
    Option(
        "--on-exit",
        "COMMAND",
        "Run this shell command when the run has ended; DDPLAUNCH_OUTCOME and others are in its environment.",
        sets="on_exit",
        feature="on_exit",
    ),
)
