"""FSDP over two processes in mixed precision: terms are made inside a sharded block, or the error says so."""

import json
import pathlib

import pytest
from two_ranks import RANKS

from loaded import Loaded


@pytest.mark.slow
def test_two_ranks_in_half_precision(tmp_path: pathlib.Path, loaded: Loaded) -> None:
    done = loaded.run(pathlib.Path(__file__).with_name("two_ranks.py"), tmp_path, processes=RANKS, needs=["train"])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        cast = {name: found.pop(name) for name in ("across: bias", "across: rotation", "model: blocks cast")}
        assert found == dict.fromkeys(found, True)
        assert len(found) == 10
        for name, message in cast.items():
            assert "\n" not in message
            assert "float32 or float64; got" in message, name
            assert "compute the terms inside it" in message, name
