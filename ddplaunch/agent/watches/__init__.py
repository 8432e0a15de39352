"""What an agent watches on its node besides the workers: GPUs and their memory, health, usage of CPU, disk and network.

Runs in the agent's process. Watches send records to the launcher; what follows from these is decided there.
"""
