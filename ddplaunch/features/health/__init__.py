"""What the state of a node's hardware means: findings, the cause of a failure, differences between nodes.

Pure: values and records in, findings and sentences out. Runs in the agent, for its node, and in the launcher, for all
nodes. Must not start a process, open a file or know a clock.
"""
