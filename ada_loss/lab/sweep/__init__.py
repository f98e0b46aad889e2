"""The sweep: cells are planned, computed by an engine and written to the ledger."""
