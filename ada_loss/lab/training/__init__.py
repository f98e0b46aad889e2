"""One training: its options, the loop, the scaling methods, checkpoints."""
