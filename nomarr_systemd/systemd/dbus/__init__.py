"""A synchronous D-Bus client, just large enough for the calls to the service manager."""
