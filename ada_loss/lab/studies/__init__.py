"""Studies built on trainings and sweeps: the search for the smallest format, gradients in deep networks, and others."""
