"""This machine: kernel calls, processes, cgroups, devices, CPUs, network addresses, limits, run folders.

Used by every process of a run. Each module wraps one facility of the operating system and cites its source. Must not
depend on a run or an attempt, except on the run tag in a process's environment.
"""
