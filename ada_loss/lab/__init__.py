"""The lab: `tasks`, single trainings (`training`), sweeps of many in a ledger (`sweep`, `cells`), their `results`.

`studies`: built on trainings and sweeps, such as the search for the smallest format.
"""
