"""Hints of the failure page for failures that are well known: what the user can do about them.

Runs in the launcher, at the end of a run that has failed. Reads the failure of one worker, and nothing else.
"""
