"""The machines of a run: host lists, hostfiles, host filters, and the environment variables of schedulers.

Pure: text and mappings in, values out. Runs in the launcher's process; starts no process and opens no connection.
"""
