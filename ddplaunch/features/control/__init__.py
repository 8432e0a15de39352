"""The control socket of a run: other processes of the user ask its launcher, as --stacks and --attach do.

The launcher serves it in the run folder; what is asked and answered are records of ``protocol.control`` and of the
features that answer. Without this folder a run is only reached by signals. Must not decide anything about a run.
"""
