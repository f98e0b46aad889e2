"""Choose a format for each tensor: by role, by module, by operand of a product, by recipe."""
