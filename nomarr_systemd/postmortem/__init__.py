"""Post-mortems: one report on a death from what systemd, the journal, the ledger and the
supervisor know of it. Nothing here changes anything.
"""
