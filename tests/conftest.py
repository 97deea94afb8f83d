"""What every test runs under: shapes and types enforced, one thread (or `RELPOS_TEST_THREADS`), fixed seeds, a
deterministic hypothesis."""

import importlib
import importlib.abc
import os
import signal
import sys
import tempfile
import threading
from typing import Any

import jaxtyping
import torch

import typechecker

# Before Triton is imported anywhere: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that inductor keeps do not say for which vectors they were compiled; read under others they give garbage.
_VECTORS = torch.backends.cpu.get_cpu_capability()
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or it compiles four programs to ask for vectors that processors report
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"relpos-inductor-{_VECTORS}")

# Pytest and what tests start may keep what they have compiled, as Python does unless told otherwise: some images of
# containers forbid it, and every process of the tests would compile all of relpos, a sixth of its start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a shell starts in the background is deaf to Ctrl-C, and so is all that it starts; some tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FINDERS = tuple(sys.meta_path)  # pytest's, which makes asserts explain themselves, and Python's

# Before anything of relpos is imported: its annotations are checked in this process.
jaxtyping.jaxtyped = typechecker.jaxtyped
jaxtyping.install_import_hook("relpos", "typechecker.check")


_LEFT_OUT = (
    "relpos.engines.triton.",
    "relpos.engines.flex",
    "relpos.core.pairs",
    "relpos.results.typed",
    "relpos.testing",
)


class _AsTheyAre(importlib.abc.MetaPathFinder):
    """Left without the checks: Triton's kernels and FlexAttention's functions, which compilers read as text, the
    conformance suite, whose loops call a function for every pair of tokens, and the reader of results, which calls one
    for every number of a file and checks types for a living."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.startswith(_LEFT_OUT):
            found = (finder.find_spec(name, path, target) for finder in _FINDERS)
            return next((spec for spec in found if spec is not None), None)
        return None


sys.meta_path.insert(0, _AsTheyAre())

import collections  # noqa: E402
import gc  # noqa: E402
import importlib.metadata  # noqa: E402
import pathlib  # noqa: E402
import random  # noqa: E402
import warnings  # noqa: E402
import zlib  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from types import ModuleType  # noqa: E402

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import interpreter  # noqa: E402
from chromium_page import browser as browser  # noqa: E402 - one for all: a process has one Playwright
from loaded import Loaded  # noqa: E402

if not torch.cuda.is_available():  # torch's own call also leaves notes, with its stack, for devices that never start
    torch.manual_seed = torch.default_generator.manual_seed
interpreter.prepare()
torch.set_num_threads(int(os.environ.get("RELPOS_TEST_THREADS", "1")))
gc.set_threshold(100_000, 50, 1000)  # every full collection walks all that was collected to be run: a tenth of the time

hypothesis.settings.register_profile(
    "relpos",
    derandomize=True,  # the same examples on every machine
    deadline=None,
    max_examples=int(os.environ.get("RELPOS_EXAMPLES", "50")),
    database=None,
)
hypothesis.settings.load_profile("relpos")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", metavar="FILE", help="write what the parity tests measured into this Markdown file")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table of parity where it is asked for and nothing failed."""
    path = session.config.getoption("--parity")
    if path and exitstatus == 0:
        parity = importlib.import_module("parity")
        if lost := parity.unmeasured(pathlib.Path(path)):
            more = f"{path} has {len(lost)} rows that this run did not measure, such as {lost[0]}"
            pytest.exit(f"{more}. Run the whole folder, or delete the page.", returncode=2)
        names = ("torch", "transformers", "timm")
        parity.write(pathlib.Path(path), [f"{name} {importlib.metadata.version(name)}" for name in names])


pytest_plugins = ["times"]

# Helpers of the tests that assert: pytest explains their failures like those of a test.
pytest.register_assert_rewrite("parity", "conformance.suite")


FAST_SHARE = 150
"""One in so many of the conformance suites' tests belongs to the fast part, always the same ones. A module whose tests
are alike sets its own, or `FAST_CASES`: so many cases of each test with parameters."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what the conformance suites ask, most is marked slow: thousands of short tests."""
    of_each: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        most = getattr(getattr(item, "module", None), "FAST_CASES", None)
        if most is not None and hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            test = item.module, item.cls, item.originalname  # type: ignore[attr-defined]
            of_each[test] += 1
            if of_each[test] > most:
                item.add_marker(pytest.mark.slow)
        of_a_suite = isinstance(item, pytest.Function) and hasattr(item.cls, "undeclared")
        share = FAST_SHARE if of_a_suite else getattr(getattr(item, "module", None), "FAST_SHARE", 1)
        if zlib.crc32(item.nodeid.encode()) % share:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was collected stays: a test that collects garbage walks its own objects, and not these, which takes half a
    second."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries say at the end what is left of theirs."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _gpu_started() -> None:
    """What PyTorch warns of once a process on a GPU, it says here, and not to the test that happens to be first."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")
            one = torch.ones(16, 16, device="cuda", requires_grad=True)
            (one @ one).sum().backward()  # in the thread of the backward, too


@pytest.fixture(scope="module", autouse=True)
def _others_objects_stay() -> None:
    """A full collection, as whoever measures memory asks for, walks what this module made: not the hundred thousands of
    objects of libraries and tests before it, which takes a second."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same generators."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_planned() -> None:
    """No test meets a plan of another's, which may have changed what decides."""
    if (plan := sys.modules.get("relpos.engines.plan")) is not None:
        plan.PLANS.clear()


CHECKED_SHARE = 4
"""One in so many of the conformance suites' tests, of the slow ones and of those with parameters runs with shapes and
types enforced, always the same ones; all other tests do. The checks are up to two fifths of their time, and they differ
in numbers more than in calls. Enforced are the first calls of each function in a test, and a part of those after them
(`typechecker`)."""


@pytest.fixture(autouse=True)
def _checked_in_part(request: pytest.FixtureRequest) -> Iterator[None]:
    slow = request.node.get_closest_marker("slow") is not None
    many = slow or hasattr(request.cls, "undeclared") or hasattr(request.node, "callspec")
    left_out = many and bool(zlib.crc32(request.node.nodeid.encode()) % CHECKED_SHARE)
    jaxtyping.config.update("jaxtyping_disable", left_out)
    typechecker.new_test()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks, as users call: for tests of our own messages, and of what only users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def loaded() -> Iterator[Loaded]:
    """What runs programs in processes that have their libraries, without the shape checks."""
    server = Loaded()
    yield server
    server.close()


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """timm, imported beside whatever torchvision there is.

    torchvision from PyPI is a CUDA build: beside a CPU torch its import fails for want of two operators, and takes timm
    with it. Their schemas are enough for the import. Where torchvision is whole or absent, nothing is done.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for operator in ("nms", "qnms"):
            TORCHVISION.append(torch.library.Library("torchvision", "FRAGMENT"))
            TORCHVISION[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm")


TORCHVISION: list[torch.library.Library] = []  # kept alive: a library that is collected takes its schemas with it
