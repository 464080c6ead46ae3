"""Jobs in the store: the operator's queue, the workers' claims, and what follows a death."""
