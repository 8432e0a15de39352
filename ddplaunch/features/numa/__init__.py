"""Workers run on the CPUs near their GPUs, and use the memory there, ``--numa-binding``.

``cpus`` chooses them in the agent, from sysfs; the worker's process binds itself. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--numa-binding``."""
    from typing import get_args

    from ddplaunch.config import NumaBinding
    from ddplaunch.rows import REAL_RUN, Option

    return (
        Option(
            "--numa-binding",
            "HOW",
            "Bind workers to CPUs and memory near their GPU: node, socket, exclusive or core-complex; auto: where that "
            "takes no CPU from the job; off: no binding. Default: auto.",
            choices=get_args(NumaBinding),
            sets="workers.numa_binding",
            only=(REAL_RUN,),
            heading="Devices",
        ),
    )
