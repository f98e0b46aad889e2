"""Bit-exact kernels: integer functions of one bit pattern, and loops over memory, for the CPU and as CUDA kernels."""
