"""A small synchronous D-Bus client for the calls to the service manager."""
