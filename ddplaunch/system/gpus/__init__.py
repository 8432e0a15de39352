"""GPUs of this machine: their list, values, errors and history, by NVML, the AMD driver's files and NCCL's RAS port.

Used by agents and commands. Importing a module here opens nothing; NVML is opened in a child process where it may hang.
"""
