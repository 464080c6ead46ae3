"""Document stores: one protocol, SQLite for one host, PostgreSQL or ArangoDB for several."""
