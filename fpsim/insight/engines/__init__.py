"""Parts of `mismatch`: run two models module by module, and replace modules of one model by those of the other."""
