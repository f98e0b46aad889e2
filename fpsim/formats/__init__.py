"""Number formats: floating point, fixed point, code books, blocks that share a scale, and those of other libraries."""
