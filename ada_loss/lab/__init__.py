"""The lab. `tasks`: what is trained. `training`: one training. `sweep`: many, in a ledger. `results`: what they gave.

`studies`: what is made of trainings and sweeps, such as the search for the smallest format.
"""
