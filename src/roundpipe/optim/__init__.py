"""Updates as functions of tensors, and what runs them over the host store."""

from roundpipe.optim.adamw import AdamW

__all__ = ["AdamW"]
