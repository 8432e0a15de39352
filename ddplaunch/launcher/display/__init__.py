"""The output of a run for the user: the workers' lines, messages, progress, failure page, report files.

Runs in the launcher's process; one thread writes each output stream, so that a slow terminal delays no other
work. Must not make decisions about the run, nor import the transports.
"""
