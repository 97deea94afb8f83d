"""Published code that says float32 inside, run in float64: what is compared is then the formula, not its rounding."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


@contextmanager
def in_float64() -> Iterator[None]:
    """Within it `torch.float`, `torch.float32`, `.float()` and the default mean float64. For published code alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "FloatTensor", torch.DoubleTensor)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)
