"""Hangs: a job in which nothing moves is noticed, explained, shown and ended; ``--stacks`` explains any job.

Agents sample their workers and report for how long they are quiet; the launcher has them examined, and explains who
waits for whom. A thread in each worker answers what torch knows of its collectives. What explains is pure.
"""
