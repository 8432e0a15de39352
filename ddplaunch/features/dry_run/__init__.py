"""The dry run, ``--dry-run``: all nodes of a job on this machine, with GPUs that are simulated on the CPU.

``fake_cuda`` runs in the workers. Only they import it.
"""


def rows() -> tuple[object, ...]:
    """``--rehearse-compile``."""
    from ddplaunch.rows import DRY_RUN, flag

    return (
        flag(
            "--rehearse-compile",
            "With --dry-run: torch.compile compiles for the CPU. Default: it returns the model unchanged.",
            sets="compile_on_cpu",
            only=(DRY_RUN,),
            after="--dry-run",
        ),
    )
