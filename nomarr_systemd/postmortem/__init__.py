"""Post-mortems: what systemd, the journal, the ledger and the supervisor know of a death, put
together into one certificate. Nothing here changes anything.
"""
