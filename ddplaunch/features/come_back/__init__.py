"""Commands about runs that are in a folder of logs: attach, logs, the live table, the page, the list of past runs.

They run in the process that the user started. They read the files of a run and use its control socket; they change
nothing in a run folder, except for the page of the run.
"""
