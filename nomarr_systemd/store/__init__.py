"""Where documents live: one small protocol, SQLite for one host, ArangoDB for several."""
