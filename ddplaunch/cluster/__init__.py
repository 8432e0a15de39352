"""The machines of a run: host lists, hostfiles, and the environment variables of schedulers.

Runs in the launcher's process, and starts no process. All modules but ``hostfile``, which reads a file, are pure: text
and mappings in, values out. The schedulers themselves are features (``schedulers.TABLE``).
"""
