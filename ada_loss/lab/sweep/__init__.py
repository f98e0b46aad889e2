"""The sweep: it plans cells, an engine computes them, and their results are written to the ledger."""
