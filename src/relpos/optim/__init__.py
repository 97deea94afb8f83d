"""Optimizers that PyTorch lacks, and parameter groups with a separate rate for position. For AdamW use PyTorch's
own."""

from relpos.optim.groups import parameter_groups as parameter_groups
from relpos.optim.lion import Lion as Lion
from relpos.optim.sophia import Sophia as Sophia
from relpos.optim.sophia import sampled_loss as sampled_loss
