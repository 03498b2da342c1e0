"""When it would run, by calculation. Pure Python, no torch, no threads."""
