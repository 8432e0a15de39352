"""Files and folders on this machine: the run folder, what is kept in it or about it, and its removal by age.

Used by the launcher, agents and commands. Must not depend on what a run does.
"""
