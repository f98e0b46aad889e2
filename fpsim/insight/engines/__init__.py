"""Parts of `mismatch`: two models run module by module, in each other's places."""
