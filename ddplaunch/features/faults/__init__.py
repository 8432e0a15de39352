"""Faults that ``--inject`` makes happen in a dry run: kills, delays, hangs of workers, nodes and connections.

The launcher decides when, the agents act. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--inject``."""
    from ddplaunch.rows import DRY_RUN, Option

    def checked(text: str, _option: str) -> str:
        from ddplaunch.features.faults import fault_spec

        fault_spec.parse(text)
        return text

    return (
        Option(
            "--inject",
            "'kill rank=3 after=5s'",
            "With --dry-run: inject a fault and report how the job handled it; 'help' lists the faults.",
            multiple=True,
            sets="injections",
            parse=checked,
            only=(DRY_RUN,),
            heading="Dry run",
        ),
    )
