"""What one sees of a model: statistics while it trains, and where and why a step breaks."""
