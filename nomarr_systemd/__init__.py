"""nomarr-systemd: long-running workers under systemd, with a restart policy that remembers."""

__version__ = "0.1.0"
