"""Document stores: one protocol, SQLite for one host, ArangoDB for several."""
