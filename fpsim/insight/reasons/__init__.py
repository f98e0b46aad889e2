"""Why a step fails: observation, the order of the checks, and the remedies that are tried."""
