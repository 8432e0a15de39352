"""What the evidence of workers says: who waits for whom, who is late, and the sentences about it.

Pure: records in, values out. Runs in the agent (which reads flight records) and in the launcher (which explains). Must
not start a process, open a file or know a clock.
"""
