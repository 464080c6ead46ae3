"""The restart ledger: accounts, incidents, spooled failures and the published copies."""
