"""The ArangoDB backend."""
