"""``nomarrctl doctor``: the checks of an installation. They change nothing."""
