"""A model as an ordered list of layers."""
