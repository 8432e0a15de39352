"""The command line: from argv and the environment to a LaunchConfig, or to one of the other commands.

Runs in the launcher's process, before any other process is started. The only package that imports click. Must not start
a run itself: ``launcher`` and ``commands`` do, from the LaunchConfig.
"""
