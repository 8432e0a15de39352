"""``--check``: whether the nodes of a command are ready for a job.

Runs in the process that the user started. Starts agents and short test processes on the nodes, and no worker.
"""
