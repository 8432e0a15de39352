"""The machines of a run: host lists and hostfiles, where they meet, and what of a scheduler the configuration holds.

Runs in the launcher's process, and starts no process. All modules but ``hostfile``, which reads a file, are pure: text
and mappings in, values out. Schedulers are features.
"""
