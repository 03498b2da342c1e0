"""Loading a model from its files: built without memory, then filled layer by layer."""
