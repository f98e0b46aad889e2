"""The lab: tasks, the one training loop, comparisons, their tables and pictures."""
