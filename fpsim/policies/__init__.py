"""Which tensor gets which format: by role, by module, by operand of a product, by recipe."""
