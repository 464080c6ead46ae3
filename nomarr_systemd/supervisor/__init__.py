"""The supervisor: reads the workers' pipes, judges their health, serves the live socket."""
