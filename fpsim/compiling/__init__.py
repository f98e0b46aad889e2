"""The compiler driver: Numba functions become machine code for CPU and CUDA, kept on disk under their sources."""
