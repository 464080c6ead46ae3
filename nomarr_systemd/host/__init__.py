"""The only modules that touch the machine: its clock, its files and, later, its systemd."""
