"""``--plan``: what a command would start, and which of its settings are probably wrong.

Runs in the process that the user started. Starts no worker; it may read the script and look at this machine.
"""
