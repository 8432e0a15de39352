"""Some of the named hosts, or of their devices: --include and --exclude, as DeepSpeed has them, and --avoid.

Runs in the launcher, before the configuration is built. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--include``, ``--exclude``, ``--avoid``."""
    from ddplaunch.rows import Option

    def option(name: str, example: str, text: str) -> Option:
        return Option(name, example, text, names_hosts=True, after="--hostfile")

    return (
        option("--include", "gpu1@gpu2:0,2", "Use only these hosts, or only these devices of a host."),
        option("--exclude", "gpu1@gpu2:0,2", "Use all hosts, or all devices of a host, except these."),
        option("--avoid", "gpu[7-8]", "Do not use these hosts of the list, also as spares."),
    )
