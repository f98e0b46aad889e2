"""One model: quantised, run under its formats, saved and restored."""
