"""The live socket of the supervisor: its protocol, and the one client of it."""
