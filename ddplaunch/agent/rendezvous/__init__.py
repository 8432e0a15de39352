"""This node's part in the rendezvous: a single node's own rounds, or those agreed with other nodes over a store.

Runs in the agent, without torch: the member, which is a process of its own, speaks to the store.
"""
