"""What a run does for its user besides starting, restarting and stopping workers: one folder per feature.

A folder has the feature's parts: ``launcher`` (a Watch), ``agent`` (a Part), ``worker`` (what runs in a worker), its
``records``, its commands and its pure rules. Only a worker's part may import torch. A feature uses the core; the core
does not import a feature.
"""
