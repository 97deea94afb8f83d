"""`relpos.testing` as another package uses it: outside this source tree, without its conftest and its folders."""

import contextlib
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from loaded import Loaded

TESTS = str(Path(__file__).resolve().parents[1])

PACKAGE = {
    "farther/__init__.py": "",
    "farther/ahead.py": '''
"""A bias that falls with the distance to keys before the query: -slope[h] * max(query - key, 0)."""

import torch
from torch import nn

from relpos import OffsetBias, at_least_float32


class BehindBias(OffsetBias):
    sign = 1

    def __init__(self, num_heads):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_heads))

    def bias(self, offsets):
        slope = at_least_float32(self.slope)
        distance = (self.sign * offsets.axes[:, 0]).clamp(min=0)
        return -slope[:, None] * distance.to(slope.dtype)


class AheadBias(BehindBias):
    """Takes the offset for key - query, an error that its symmetric tests would never show."""

    sign = -1
''',
    "checks/test_ahead.py": """
import torch

from farther.ahead import AheadBias, BehindBias
from relpos.testing import MechanismSuite, oracle


class TestBehind(MechanismSuite):
    axes = (1,)
    translation_invariant = True
    kind = BehindBias

    def build(self, site):
        mechanism = self.kind(site.num_heads)
        torch.nn.init.uniform_(mechanism.slope, 0.5, 1.5)
        return mechanism

    def oracle_bias(self, mechanism, queries, keys):
        def behind(query, key):
            return 0.0 if query is None or key is None else float(max(query[0] - key[0], 0))

        sides = oracle.places(queries), oracle.places(keys)
        distance = torch.tensor([[behind(query, key) for key in sides[1]] for query in sides[0]])
        return -mechanism.slope[:, None, None] * distance.to(mechanism.slope.dtype)


class TestAhead(TestBehind):
    kind = AheadBias
    declared = ()
    sampled = 1
""",
    "pytest.ini": "[pytest]\nfilterwarnings =\n    error\n    ignore:Module already imported so cannot be rewritten\n",
}


FORGET = f"""
import os, sys
for name, module in list(sys.modules.items()):
    if (getattr(module, "__file__", None) or "").startswith({TESTS!r}):
        del sys.modules[name]
sys.path[:] = [os.getcwd(), *(path for path in sys.path if not path.startswith({TESTS!r}))]
for name in [name for name in os.environ if name.startswith(("PYTEST", "TRITON"))]:
    del os.environ[name]
"""


def alone(loaded: Loaded, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Code in a folder, in a process that has PyTorch and the library, and forgets what else of this repository."""
    with contextlib.chdir(folder):
        return loaded.run("-c", FORGET + code)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, loaded: Loaded) -> dict[str, dict[str, str | None]]:
    """Of a run of the package's tests: class to test to the message of its failure, None where it passed."""
    folder = tmp_path_factory.mktemp("package")
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    words = ["-q", "-p", "no:cacheprovider", "--junitxml=outcomes.xml", "checks"]
    done = alone(loaded, folder, f"import pytest\nraise SystemExit(int(pytest.main({words!r})))")
    assert done.returncode == 1, f"failures were expected, and errors were not:\n{done.stdout}{done.stderr}"
    assert (folder / "outcomes.xml").exists(), done.stderr
    found: dict[str, dict[str, str | None]] = {}
    for case in ElementTree.parse(folder / "outcomes.xml").iter("testcase"):
        assert case.find("skipped") is None, f"{case.get('name')} is skipped"
        assert case.find("error") is None, f"{case.get('name')} cannot run"
        failure = case.find("failure")
        name = str(case.get("classname")).rpartition(".")[2]
        found.setdefault(name, {})[str(case.get("name"))] = None if failure is None else failure.get("message")
    return found


@pytest.mark.slow
def test_a_right_mechanism_passes(outcomes: dict[str, dict[str, str | None]]) -> None:
    assert not {name: message for name, message in outcomes["TestBehind"].items() if message is not None}


@pytest.mark.slow
def test_the_suite_is_short_and_leaves_nothing_out_that_it_declares(
    outcomes: dict[str, dict[str, str | None]],
) -> None:
    found = {name.partition("[")[0] for name in outcomes["TestBehind"]}
    assert {
        "test_batched_places",
        "test_decoding_is_the_full_pass",
        "test_embedding",
        "test_left_padding_is_right_padding",
        "test_packed_is_separate",
        "test_prefixes_are_the_same_whatever_the_others_are",
        "test_translation",
        "test_under_patterns",
        "test_values_and_gradients",
    } <= found
    assert not {"test_preset", "test_a_part_of_a_grid_reads_the_same_numbers"} & found
    assert len(outcomes["TestBehind"]) < 120


@pytest.mark.slow
def test_a_wrong_sign_fails_and_is_said(outcomes: dict[str, dict[str, str | None]]) -> None:
    """By the oracle alone: the mechanism agrees with itself."""
    failed = {name: message for name, message in outcomes["TestAhead"].items() if message is not None}
    assert {name.partition("[")[0] for name in failed} == {"test_values_and_gradients"}
    wrong = "test_values_and_gradients[odd length, reference, float64]"
    assert wrong in failed
    assert "test_values_and_gradients[one token, reference, float64]" not in failed, "one token has no direction"
    message = str(failed[wrong])
    assert "output (odd length, reference, float64): RMS error" in message
    assert "they differ most at [" in message
    assert "expected" in message


@pytest.mark.slow
def test_without_pytest_one_line_says_what_to_install(tmp_path: Path, loaded: Loaded) -> None:
    code = "import sys; sys.modules['pytest'] = None; import relpos; print('relpos is there'); import relpos.testing"
    done = alone(loaded, tmp_path, code)
    assert done.stdout == "relpos is there\n"
    last = 'ModuleNotFoundError: relpos.testing needs pytest; install it with: pip install "relpos[test]"'
    assert done.stderr.splitlines()[-1] == last
    assert "During handling" not in done.stderr
