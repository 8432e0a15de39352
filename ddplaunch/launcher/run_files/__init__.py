"""The files that a run leaves: logs from the nodes, report.json, samples, metrics, the page, the memory of nodes.

Runs in the launcher's process; large files are written in threads. A file that cannot be written gives a warning and
never ends the run.
"""
