"""The supervisor: reads the workers' pipes, judges their health, and tells everyone who asks."""
