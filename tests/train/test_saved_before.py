"""A model that an earlier version saved loads in this one and says the same.

`saved_0_1_0/` was written by relpos 0.1.0 as it stood before `save_pretrained`: untrained models of `relpos train`, and
what they made of an input then. It is never written anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relpos.train import load

SAVED = Path(__file__).parent / "saved_0_1_0"


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_folder_of_an_earlier_version_loads(kind: str) -> None:
    model, config = load(SAVED / kind)
    expected = load_file(SAVED / kind / "expected.safetensors")
    torch.testing.assert_close(model(expected["input"]), expected["output"])
    assert config["relpos"] == "0.1.0"
