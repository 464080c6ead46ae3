"""Everything that talks to systemd: its bus, unit files, journal, notifications and run files."""
