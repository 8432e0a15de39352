"""What a run watches while its workers run: hangs, slow ranks, health, SLURM, usage, metrics, debugging sessions.

Runs in the launcher's process. Each ``Watch`` follows the events of all nodes; ``all_watches`` makes them and hands the
events on. A watch may ask the run to stop; it does not start, restart or end anything itself.
"""
