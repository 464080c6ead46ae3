"""A private systemd, and the demo that runs in it."""
