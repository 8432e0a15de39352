"""This machine: kernel calls, processes, cgroups, devices, CPUs, network addresses, limits, run folders.

Used by every process of a run. Each module wraps one facility of the operating system and cites its source. Must not
depend on an attempt; of a run it knows only the tag in its processes' environment, the folder and the endpoint.
"""
