"""Saved runs: what they hold, how they are written while training goes on, and found again."""
