"""The dry run, ``--dry-run``: all nodes of a job on this machine, with GPUs that are simulated on the CPU.

``fake_cuda`` runs in the workers. Only they import it.
"""
