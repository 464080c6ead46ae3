"""The machine: its clocks, its files, its users, and the paths of an installation."""
