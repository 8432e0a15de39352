"""Whether the hardware of the nodes is sound: at the start, while workers run, after a failure, and across runs.

``agent`` and ``launcher`` are its parts of a run; ``gpu_faults`` and ``gpu_memory_wait`` belong to the first. In the
launcher, ``node_memory`` keeps what runs have found in ``nodes_file``. The other modules are pure: values and records
in, findings and sentences out.
"""
