"""Beside the stub of torch there is no numpy, as on a machine without it: its import costs 0.1 s of CPU."""

raise ModuleNotFoundError("there is no numpy beside the stub of torch: mark this test with @pytest.mark.torch")
