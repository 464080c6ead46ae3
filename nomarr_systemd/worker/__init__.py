"""The runtime of workers written in Python: subclass ``runtime.Worker``."""
