"""Updates as functions of tensors, and what runs them over the host store."""

from roundpipe.optim.adam import Adam
from roundpipe.optim.adamw import AdamW
from roundpipe.optim.decay import decay_groups
from roundpipe.optim.scaler import GradScaler
from roundpipe.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "decay_groups"]
