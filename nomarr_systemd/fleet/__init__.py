"""Hosts that share a store: their leases, and restarts that wait for each other."""
