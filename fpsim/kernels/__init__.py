"""The loops over memory: for each body a CPU loop, and a CUDA kernel beneath it."""
