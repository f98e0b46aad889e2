"""Tools that look at a model: statistics while it trains, and where and why a step breaks."""
