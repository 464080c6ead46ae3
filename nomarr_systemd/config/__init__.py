"""The configuration: its settings, the file, the checks, and what follows from them. Pure."""
