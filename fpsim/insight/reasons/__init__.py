"""Why a step fails: what is seen in it, which rule speaks first, and the remedies that are tried."""
