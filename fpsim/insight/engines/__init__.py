"""Parts of `mismatch`: run two models module by module, with modules of one in the places of the other's."""
