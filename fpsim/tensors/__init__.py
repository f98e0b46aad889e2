"""What happens to a tensor: it is rounded, multiplied, tallied; under autograd, tracers and compilers."""
