"""The lab: `tasks`, single trainings (`training`), sweeps of many trainings (`sweep`, `cells`), and `results`.

`studies` are built on trainings and sweeps; one of them searches for the smallest format.
"""
