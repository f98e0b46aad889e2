"""What a sweep gave: rows, tables, figures, the report, and trackers."""
