"""What newcomers type first, each answered with the name that they meant."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import relpos
from relpos.comparison import find_build
from relpos_command.parsing import parse

Q = torch.randn(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: relpos.attention(Q, Q, Q, position="t5"),  # type: ignore[call-overload]
            ValueError,
            r"relpos\.create_position\('t5', num_heads=4, head_dim=8, queries=\.\.\.\)",
        ),
        (lambda: relpos.attention(Q, Q, Q, mask=torch.ones(2, 6, 6).bool()), ValueError, r"pass mask\[:, None\]"),
        (
            lambda: relpos.attention(Q, Q, Q, is_causal=True),  # type: ignore[call-overload]
            TypeError,
            r'^expected an argument of attention \(q, .*\); got is_causal=\. Pass mask="causal"\.$',
        ),
        (lambda: relpos.attention(Q, Q, Q, positions=None), TypeError, "Did you mean 'position'"),  # type: ignore[call-overload]
        (lambda: relpos.T5Bias(4, buckets=8), TypeError, r"got buckets=\. Did you mean 'num_buckets'"),  # type: ignore[call-arg]
        (lambda: relpos.AliBi, AttributeError, r"Did you mean relpos\.ALiBi\?"),  # type: ignore[attr-defined]
        (lambda: find_build("tim:vit_tiny"), ValueError, r"got 'tim:vit_tiny'\. Did you mean 'timm:vit_tiny'\?"),
    ],
)
def test_the_right_name_is_said(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("typed", "meant"), [("t6", "t5"), ("two_slope", None), ("tim:", None), ("alibii", "alibi")])
def test_a_position_s_message_has_the_nearest_six(typed: str, meant: str | None) -> None:
    with pytest.raises(ValueError, match="expected the name of a position; got") as raised:
        relpos.position.find(typed)
    said = str(raised.value)
    assert ("Did you mean" in said) == (meant is not None)
    if meant is not None:
        assert said.index(f"Did you mean {meant!r}?") < said.index("Such as")
    named = re.search(r"Such as (.*); relpos list positions shows all", said)
    assert named is not None
    assert len(named[1].split(", ")) == 6
    assert "FILE.py:NAME" in said


def test_dir_has_what_is_public() -> None:
    assert set(relpos.__all__) <= set(dir(relpos))
    assert not {"importlib", "typing"} & set(dir(relpos))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "--position", "t5"], r"unrecognized arguments: --position.* Did you mean --positions\?"),
        (["train", "--pos", "t5", "--out", "x"], r"--pos"),
        (["explain"], r"got 'explain'\. In Python: print\(relpos\.explain\("),
    ],
)
def test_the_command_refuses_what_it_does_not_have(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_command_prints_its_version() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "from relpos_command.parsing import parse; parse(['--version'])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert made.stdout == f"relpos {relpos.__version__}\n"
