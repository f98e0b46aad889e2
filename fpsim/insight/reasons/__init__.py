"""Parts of `why`: observe a step, run its checks in order, and try remedies."""
