"""What the GPUs of a node are like and do: read for other features, by a child process that asks the driver.

``agent`` has ``GpusOfJob``, which other parts of the agent get from ``of_job``; a command uses ``reader.read_once``.
``child`` is the process, with ``nvml`` and ``amd`` for the drivers. Which GPUs there are is known without it:
``system.devices``.
"""
