"""Cells of a sweep, and their files in its folder: plan, names, ledger and telemetry."""
