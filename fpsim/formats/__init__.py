"""What a format is: floating point, fixed point, blocks that share a scale, and the formats of other libraries."""
