"""The model that is trained: where it comes from, how it is loaded, what of it is trained."""
