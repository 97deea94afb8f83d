"""The cases: names, families, shrinking; and every engine on every kind of case, shrunk, against the reference."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from relpos import backends
from relpos.bench.cases import Case, all_families, every_case, families, find_cases, gpu_families
from relpos.bench.check import faults, small_cases
from relpos.bench.inputs import make
from relpos.bench.modules import baseline, op_case, peers_of
from relpos.bench.peers import engine_peer, taken
from relpos.bench.run import BenchSettings
from relpos.testing.engines import INTERPRETED


def kinds() -> list[Case]:
    """One small case of each structure that the benchmark has."""
    found: dict[tuple[object, ...], Case] = {}
    for case in every_case().values():
        op = replace(op_case(case), device="cpu")
        found.setdefault((op.position, op.dtype, op.causal, bool(op.prefix)), replace(op, what="step").shrunk(40))
    return list(found.values())


INTERPRETED_KINDS = (
    "line-16-bfloat16-step-causal-h4", "grid-4x4+1-float32-step-h4", "shaw-16-float32-step-h4",
    "transformer_xl-16-float32-step-h4", "deberta-16-float32-step-h4", "t5-16-bfloat16-step-h4",
)  # fmt: skip
"""One of each position, of either dtype, with and without a mask and a prefix: kernels have tests of their own."""


@pytest.mark.slow
@pytest.mark.parametrize("case", kinds(), ids=lambda case: case.name)
def test_every_engine_is_green_on_every_kind_of_case(case: Case) -> None:
    few = replace(case.shrunk(16), heads=4)  # of fewer numbers an RMS says little
    run: dict[Case, list[str]] = {case: [], few: []}
    for engine in ("auto", *backends()):
        own = few if engine in INTERPRETED else case
        if taken(own, engine) is None:
            with pytest.raises(NotImplementedError):
                engine_peer(engine).build(make(own))()
        elif own is case or few.name in INTERPRETED_KINDS:
            run[own].append(engine)
    assert len(run[case]) >= 3
    for own, engines in run.items():
        assert faults(own, [engine_peer(engine) for engine in engines], engines) == {}


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on a GPU")
def test_every_position_is_among_the_interpreted_kinds() -> None:
    few = [replace(case.shrunk(16), heads=4) for case in kinds()]
    assert {case.name for case in few} >= set(INTERPRETED_KINDS)
    assert {case.position for case in few if case.name in INTERPRETED_KINDS} == {case.position for case in few}


def test_names_say_what_is_not_usual() -> None:
    assert Case("line", (4096,), "step", causal=True).name == "line-4096-float32-step-causal"
    assert Case("grid", (64, 64), "step", prefix=1).name == "grid-64x64+1-float32-step"
    assert Case("grid", (7, 7), batch=1024).name == "grid-7x7-float32-forward-b1024"
    assert Case("line", (8,), heads=4, head_dim=16, dtype="bfloat16").name == "line-8-bfloat16-forward-h4-d16"
    assert Case("deberta", (2048,), "step", layer=True).name == "layer-deberta-2048-float32-step"


def test_a_name_names_one_case() -> None:
    everything = [case for cases in all_families().values() for case in cases]
    assert len({case.name for case in everything}) == len(set(everything)) == len(every_case())


def test_families_have_what_was_promised() -> None:
    assert {case.sizes[0] for case in families()["lengths"]} == {256, 512, 1024, 2048, 4096, 8192, 16384}
    assert {case.sizes for case in families()["grids"]} == {(14, 14), (32, 32), (64, 64)}
    assert {case.count for case in families()["windows"]} == {49, 144, 196, 256}
    small = families()["small"]
    assert {(case.queries, case.count) for case in small if case.what == "forward"} == {(1, 64), (None, 64)}
    assert {(case.batch, case.count, case.heads) for case in small if case.what == "step"} == {
        (1, 64, 8), (8, 65, 4), (32, 49, 8), (8, 197, 8),
    }  # fmt: skip
    lengths = families()["lengths"]
    assert {(case.dtype, case.causal, case.what) for case in lengths} >= {
        ("float32", False, "forward"), ("float32", True, "step"), ("bfloat16", False, "step"),
        ("bfloat16", False, "forward"), ("float32", False, "step"), ("float32", True, "forward"),
    }  # fmt: skip
    on_gpu = gpu_families()
    assert {case.sizes[0] for case in on_gpu["gpu-lengths"]} == {512, 2048, 8192, 32768, 65536}
    assert {(case.head_dim, case.causal, case.what) for case in on_gpu["gpu-lengths"]} == {
        *itertools.product((64, 128), (False, True), ("forward", "step"))
    }
    assert {(case.count, case.batch) for case in on_gpu["gpu-windows"]} == {(49, 4096), (64, 4096)}
    assert {case.count * case.batch for case in on_gpu["gpu-short"]} == {65536}
    assert {(case.device, case.dtype) for cases in on_gpu.values() for case in cases} == {("cuda", "bfloat16")}


def test_cases_of_two_devices_are_not_mixed_and_a_gpu_must_be_there() -> None:
    on_gpu = find_cases("gpu-target")
    with pytest.raises(ValueError, match="cases of one device; got cpu and cuda"):
        BenchSettings.make((*on_gpu, Case("line", (8,))))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"a CUDA device for these cases; got none\. Leave out"):
            BenchSettings.make(on_gpu)


def test_shrunk_keeps_the_structure() -> None:
    for case in every_case().values():
        small = case.shrunk(100)
        assert small.count - small.prefix <= 100
        assert case.shrunk(99).count - case.prefix <= 99
        assert small.batch == min(case.batch, 2)
        assert replace(small, sizes=case.sizes, batch=case.batch) == case
        assert len(small.sizes) == len(case.sizes)
        assert case.shrunk(10**6).sizes == case.sizes
        if case.position == "grid":
            assert small.sizes == (min(case.sizes[0], 10),) * 2


def test_a_case_is_checked_shrunk_and_on_one_head_at_full_length() -> None:
    case = Case("line", (4096,), "step")
    assert [(one.sizes, one.heads) for one in small_cases(case, ours=True)] == [((512,), 8), ((4096,), 1)]
    assert [(one.sizes, one.heads) for one in small_cases(case, ours=False)] == [((512,), 8)]
    assert len(small_cases(replace(case, sizes=(4097,)), ours=True)) == 1
    assert len(small_cases(replace(case, sizes=(512,)), ours=True)) == 1
    for small in families()["small"]:  # computed in parts as it is timed
        assert small_cases(small, ours=True) == small_cases(small, ours=False) == (small,)
    grid = Case("grid", (64, 64), "step", prefix=1)
    assert small_cases(grid, ours=True)[1] == replace(grid, heads=1)
    assert not any(one.layer for one in small_cases(replace(case, layer=True), ours=True))


def test_families_and_names_are_found_once_and_in_order() -> None:
    found = find_cases("line-4096-float32-step, windows ,target")
    assert found[0].name == "line-4096-float32-step"
    assert found[1:9] == families()["windows"]
    assert set(found) == set(families()["target"])
    assert len(found) == len(set(found))
    assert set(find_cases("all,gpu")) == set(every_case().values())
    assert {case.device for case in find_cases("gpu")} == {"cuda"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("line-4096-float32-stp", r"got 'line-4096-float32-stp'\. Did you mean 'line-4096-float32-step'"),
        ("targets", r"among target, lengths, .*; got 'targets'\. Did you mean 'target'"),
        ("xyz", r"got 'xyz'\. See relpos bench --list"),
        (" , ", r"at least one case; got none"),
    ],
)
def test_an_unknown_case_says_what_is_near(asked: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_cases(asked)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"position": "lines"}, "a case's position to be one of 'none', 'line'"),
        ({"what": "backward"}, "what a case computes to be one of 'forward', 'step'"),
        ({"dtype": "float8"}, "a case's dtype to be one of"),
        ({"sizes": (4, 4)}, r"sizes of 1 axes for line; got tuple \(4, 4\)"),
        ({"sizes": (0,)}, "each size of a case to be an integer of at least 1"),
        ({"heads": 0}, "a case's heads to be an integer of at least 1"),
        ({"prefix": -1}, "a case's prefix to be an integer of at least 0"),
    ],
)
def test_a_case_checks_its_arguments(arguments: dict[str, object], says: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=re.compile(says)):
        Case(**{"position": "line", "sizes": (8,), **arguments})  # type: ignore[arg-type]


def test_inputs_are_the_same_numbers_in_every_dtype_and_process() -> None:
    case = Case("line", (5,), "step", "bfloat16")
    own, wide = make(case), make(case, torch.float64)
    for a, b in zip((*own.qkv, own.gradient), (*wide.qkv, wide.gradient), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a.double(), b)
    assert own.position is not None
    assert wide.position is not None
    for a, b in zip(own.position.parameters(), wide.position.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
        assert torch.equal(a.double(), b)
    assert not any(x.requires_grad for x in make(replace(case, what="forward")).qkv)


def test_the_engine_that_is_named_is_the_one_that_runs() -> None:
    """Which depends on whether there is anything to learn."""
    for what, engine in (("forward", "sdpa"), ("step", "streaming")):
        case = Case("line", (400,), what, batch=2)  # type: ignore[arg-type]
        assert taken(case, "auto") == engine
        inputs = make(case.shrunk(200))
        assert inputs.position is not None
        assert all(p.requires_grad is (what == "step") for p in inputs.position.parameters())


def test_weights_change_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, negated = make(Case("line", (9,), "forward")), []
    (peer,) = (peer for peer in peers_of(inputs.case, ("auto",)) if peer.name == "relpos-changed")
    work = peer.build(inputs)
    monkeypatch.setattr(torch.Tensor, "neg_", lambda x: (negated.append(x.shape), x)[1])
    work()
    assert inputs.position is not None
    assert negated == [p.shape for p in inputs.position.parameters() for _ in range(2)]


def test_who_runs_what() -> None:
    def names(case: Case) -> list[str]:
        return [peer.name for peer in peers_of(case, ("auto", "streaming"))]

    line = Case("line", (64,), "forward")
    ours = ["relpos-auto", "relpos-streaming"]
    small = ["sdpa-ready", "relpos-terms", "relpos-cold", "relpos-changed", "relpos-decoding"]
    assert names(line) == ["sdpa-free", *ours, "sdpa-dense", *small, "flex", "matmul"]
    assert names(replace(line, what="step")) == [
        "sdpa-free",
        *ours,
        "sdpa-dense",
        "sdpa-ready",
        "relpos-cold",
        "relpos-changed",
        "matmul",
    ]
    long = replace(line, sizes=(4096,))
    assert names(long) == ["sdpa-free", *ours, "sdpa-dense", "flex", "matmul"]
    assert names(Case("shaw", (64,))) == ["sdpa-free", *ours, "matmul"]
    assert names(Case("shaw", (64,), layer=True)) == ["layer-free", *ours, "deberta-v2"]
    assert names(Case("t5", (64,), layer=True)) == ["layer-free", *ours, "t5"]
    assert names(Case("grid", (8, 8), layer=True, prefix=1)) == ["layer-free", *ours, "timm"]
    on_gpu = replace(line, dtype="bfloat16", device="cuda", what="step")
    free = ["sdpa-free", "sdpa-cudnn", "relpos-free"]
    assert names(on_gpu) == [*free, *ours, "sdpa-dense", "flex"]
    assert names(replace(on_gpu, sizes=(65536,))) == [*free, *ours, "sdpa-dense"]
    for case in every_case().values():
        assert baseline(case) in names(case)
    assert baseline(Case("shaw", (64,), layer=True)) == "deberta-v2"
    assert baseline(Case("t5", (64,), layer=True)) == "layer-free"
