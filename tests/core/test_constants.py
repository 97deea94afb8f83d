"""Numbers of the host on a device: made once where a copy would make it wait, never in a trace."""

import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from relpos.core import constant

META = torch.device("meta")
"""Stands for a GPU: it is not the CPU."""


def test_it_is_made_once_for_its_numbers_dtype_and_device() -> None:
    first = constant((1, 2), torch.int64, META)
    assert constant((1, 2), torch.int64, META) is first
    assert constant((1, 3), torch.int64, META) is not first
    assert constant((1, 2), torch.float64, META).dtype == torch.float64
    assert constant((1, 2), torch.int64, torch.device("cpu")).tolist() == [1, 2]


def test_the_first_may_ask_without_gradients() -> None:
    with torch.inference_mode():
        made = constant((0.5, 7.25), torch.float32, META)
    assert not made.is_inference()


def test_a_trace_is_given_its_own() -> None:
    before = constant((3, 5), torch.int64, META)
    with FakeTensorMode():
        assert constant((3, 5), torch.int64, META) is not before
        seen = constant((3, 5), torch.int64, torch.device("cuda"))  # only says that it is there
    assert isinstance(seen, FakeTensor)
    assert constant((3, 5), torch.int64, META) is before
