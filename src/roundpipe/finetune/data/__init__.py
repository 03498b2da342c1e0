"""From files to batches: rows, what they mean, tokens, the order in which they are trained."""
