"""Operations on one tensor: round, encode, multiply and tally it, in plain torch, under autograd, tracers and
compilers.
"""
