"""The transport over SSH: configuration, keys, known hosts, connections, jump hosts, and the agent's channel.

Runs in the launcher's process, with one thread for each connection. The only package that imports paramiko; it is
imported only where hosts are reached over SSH.
"""
