"""The compiler driver: Numba functions become machine code for CPU and CUDA, cached on disk by a digest of their
sources.
"""
