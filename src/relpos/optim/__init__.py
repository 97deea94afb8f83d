"""Optimizers that PyTorch lacks. AdamW is PyTorch's own."""

from relpos.optim.lion import Lion as Lion
from relpos.optim.sophia import Sophia as Sophia
from relpos.optim.sophia import sampled_loss as sampled_loss
