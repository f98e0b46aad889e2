"""Studies made of trainings and sweeps: the search for the smallest format, gradients in depth, what rounds where."""
