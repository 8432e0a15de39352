"""The machines of a run: host lists, hostfiles, host filters, and the environment variables of schedulers.

Runs in the launcher's process, and starts no process. All modules but two are pure: text and mappings in, values out.
``hostfile`` reads a file. ``endpoint_exchange`` talks to MPI's process manager, over a socket that this process has
inherited, or by a library.
"""
