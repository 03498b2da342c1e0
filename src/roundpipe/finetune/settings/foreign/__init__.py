"""Keys of other trainers' configs that ask for what is so already, or for what is not done here.

One module a trainer. Each holds two tables, written as a sentence and the keys that it is true of:
``NEEDLESS`` keys are taken and named, ``REFUSED`` keys are an error with the sentence as its way
out. ``NEUTRAL`` values of a refused key ask for nothing, as null, false and an empty value do. A
key that several trainers have stands once, with the one that others took it from.
"""
