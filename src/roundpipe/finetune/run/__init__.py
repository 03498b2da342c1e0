"""A run from config to result."""
