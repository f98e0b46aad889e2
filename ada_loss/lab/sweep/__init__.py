"""The sweep: which cells there are, where they are computed, and the ledger of what became of them."""
