"""The pure core: values and decisions. No clock, no file, no process, no database, no log."""
