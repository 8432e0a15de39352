"""Answers of an agent that runs no job: the runs on this host, the state of this node, a question to a launcher.

Runs in the agent's process, for the commands of ``commands``. ``--kill`` ends processes; all else only reads.
"""
