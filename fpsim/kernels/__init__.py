"""Bit-exact kernels: integer functions of one bit pattern, and loops over memory, on the CPU with a CUDA kernel beside
each.
"""
