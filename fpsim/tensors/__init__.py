"""Operations on one tensor: round, encode, multiply, tally it, in plain torch, under autograd, tracers, compilers."""
