"""Files and folders on this machine: the run folder, and what is kept in it or about it.

Used by the launcher, agents and commands. Must not depend on what a run does.
"""
