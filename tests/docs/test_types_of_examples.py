"""The Python of the README and the guides is right by mypy --strict, as an editor of their readers sees it."""

import getpass
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from guides import PAGES, meant

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
PLAIN = "# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False\n"
"""Functions of a guide have no annotations, to be short; what they do is checked all the same."""
CALLS = """
import torch
from torch import Tensor
from typing_extensions import assert_type

import relpos

q = k = v = torch.randn(1, 2, 6, 8)
flag = bool(len(q))
assert_type(relpos.attention(q, k, v), Tensor)
assert_type(relpos.attention(q, k, v, return_lse=False, mask="causal"), Tensor)
assert_type(relpos.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
assert_type(relpos.attention(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor])
assert_type(relpos.flash_attention(q, k, v), Tensor)
relpos.attention(q, k, v, mask="local")  # type: ignore[call-overload]
relpos.attention(q, k, v, mask=torch.ones(6, 6, dtype=torch.bool), backend="reference").sum()
"""


@pytest.mark.slow
def test_examples_and_calls_have_the_types_that_they_should(tmp_path: Path) -> None:
    """What mypy knows of PyTorch is kept from run to run: it takes it up again where versions and options are the
    same, and files are as they were."""
    assert BLOCKS
    for number, block in enumerate([*BLOCKS, CALLS]):
        (tmp_path / f"example_{number}.py").write_text(block, encoding="utf-8")
    for page in PAGES:
        (tmp_path / f"{page.stem.replace('-', '_')}.py").write_text(PLAIN + meant(page), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        "--cache-dir",
        os.path.join(tempfile.gettempdir(), f"relpos-mypy-{getpass.getuser()}"),
    ]
    files = sorted(map(str, tmp_path.glob("*.py")))
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, *files], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
