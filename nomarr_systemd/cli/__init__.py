"""nomarrctl: one module per family of verbs. The only layer that prints."""
