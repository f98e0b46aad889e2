"""The cells of a sweep, and what its folder keeps of them: plan, names, ledger and telemetry."""
