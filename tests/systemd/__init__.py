"""Tests on a real systemd: a private user manager with a journal of its own (lab A)."""
