"""Workers that call a function of the launcher's program, ``ddplaunch.launch(function)``.

The launcher encodes the call and reads the values; the worker makes the call. Only the worker's part imports torch.
"""
