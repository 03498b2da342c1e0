"""Wraps models that are no chain: each heavy submodule by itself."""
