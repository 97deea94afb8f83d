"""The check that must be green, times and ratios, targets, memory, tables and pictures."""

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from loaded import Loaded
from relpos.bench import check, measure, modules, peers
from relpos.bench.cases import LENGTHS, Case, every_case, find_cases
from relpos.bench.inputs import make
from relpos.bench.peers import Peer, Workload, engine_peer
from relpos.bench.picture import curves, drawable, save_picture
from relpos.bench.table import render
from relpos.bench.targets import judge, memory_fits, targets

SMALL = Case("line", (24,), "step")


def named(case: Case, name: str) -> Peer:
    (peer,) = (peer for peer in modules.peers_of(case, ("auto",)) if peer.name == name)
    return peer


def spoiled(which: int, by: float) -> Peer:
    """The reference with one of its results moved."""
    sound = engine_peer("reference")

    def build(inputs: Any) -> Any:
        work = sound.build(inputs)

        def run() -> tuple[Tensor, ...]:
            results = [x.clone(memory_format=torch.contiguous_format) for x in work()]
            results[which].flatten()[3] += by
            return tuple(results)

        return run

    return replace(sound, build=build)


@pytest.mark.parametrize("which", range(5), ids=["output", "q", "k", "v", "table"])
@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_any_wrong_result_is_red(which: int, by: float) -> None:
    assert check.faults(SMALL, [spoiled(which, by)], []) != {}
    assert check.faults(SMALL, [spoiled(which, 0.0)], []) == {}


def test_the_error_that_is_allowed_is_the_rule_of_the_tests() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    plain = exact + 1e-3
    eps = torch.finfo(torch.float32).eps
    for dtype, factor in ((torch.float32, 2.0), (torch.bfloat16, 1.1)):
        rounding = torch.finfo(dtype).eps
        for share, fine in ((0.999, True), (1.001, False)):
            error = share * (factor * 1e-3 + rounding)
            assert (check._fault(exact - error, exact, plain, dtype) is None) is fine
    one = exact.clone()
    one[0] += 1.9e-2  # its root mean square is fine, its size is not
    assert "largest" in str(check._fault(one, exact, plain, torch.float32))
    small = exact * 1e-3  # a difference of terms of size 1
    assert "RMS" in str(check._fault(small + 0.9 * eps, small, small, torch.float32))
    assert check._fault(small + 0.9 * eps, small, small, torch.float32, terms=1.0) is None
    assert "shape" in str(check._fault(exact[:-1], exact, exact, torch.float32))


@pytest.mark.parametrize("which", range(5), ids=["output", "q", "k", "v", "table"])
def test_float64_is_held_to_its_own_rounding_and_not_to_the_very_bits_of_the_reference(which: int) -> None:
    """Sums in another order differ by some of its units, which the reference does not differ by from itself."""
    case = replace(SMALL, dtype="float64")
    assert check.faults(case, [engine_peer("streaming")], ["streaming"]) == {}
    assert check.faults(case, [spoiled(which, 1e-15)], []) == {}
    assert check.faults(case, [spoiled(which, 1e-5 if which == 4 else 1e-11)], []) != {}  # its table is in float32


def test_auto_is_checked_by_the_engine_that_it_takes_for_the_whole_case(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def recorded(engine: str) -> Peer:
        built.append(engine)
        return engine_peer("reference")

    monkeypatch.setattr(check, "taken", lambda case, engine: "streaming" if case.batch > 2 else "sdpa")
    monkeypatch.setattr(check, "engine_peer", recorded)
    case = replace(SMALL, batch=4)
    assert check.faults(case, [engine_peer("auto")], ["auto"]) == {}
    assert built[0] == "streaming"
    assert "sdpa" not in built


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ["forward", "step"])
def test_a_gathered_bias_is_the_same_attention(what: Any, causal: bool) -> None:
    case = replace(SMALL, what=what, causal=causal)
    assert check.faults(case, [named(case, "sdpa-dense")], []) == {}


@pytest.mark.parametrize("causal", [False, True])
def test_plain_sdpa_is_attention_without_position(causal: bool) -> None:
    case = replace(SMALL, causal=causal)
    free = named(case, "sdpa-free").build(make(case))()
    bare = make(replace(case, position="none"))
    for a, b in zip(free, engine_peer("reference").build(bare)(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_plain_layer_has_the_projections_of_ours() -> None:
    case = Case("none", (9,), "step", causal=True, heads=2, head_dim=4, layer=True)
    plain, ours = modules.PlainLayer(case), modules.MultiHeadAttention(8, 2)
    ours.load_state_dict(plain.state_dict())
    inputs = make(case)
    assert inputs.x is not None
    torch.testing.assert_close(plain(inputs.x), ours(inputs.x, mask=inputs.mask))


@pytest.mark.parametrize(("what", "products"), [("forward", 2), ("step", 7)])
def test_the_roofline_has_two_products_forward_and_seven_a_step(what: Any, products: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    case = Case("none", (600,), what, heads=2, head_dim=8)  # more than one tile
    work = named(case, "matmul").build(make(case))

    def added(_: object, a: tuple[int, ...], b: tuple[int, ...], **__: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: added}) as counter:
        work()
    assert counter.get_total_flops() == products * 2 * 2 * 600 * 600 * 8


@pytest.mark.slow
@pytest.mark.parametrize("position", ["shaw", "transformer_xl", "deberta", "t5", "grid"])
def test_layers_of_other_libraries_run(position: Any, timm: object) -> None:
    case = Case(position, (3, 4) if position == "grid" else (12,), "step", batch=2, layer=True)
    entries = {entry["peer"]: entry for entry in measure.time_case(case, ("auto",), 1, 1, lambda _: None)}
    other = {"grid": "timm", "t5": "t5"}.get(position, "deberta-v2")
    assert set(entries) == {"layer-free", "relpos-auto", other}
    assert entries[other]["reason"] is None
    against = "deberta-v2" if other == "deberta-v2" else "layer-free"
    for entry in entries.values():
        assert entry["against"] == against
        assert entry["ms"]["median"] > 0
        assert len(entry["rounds_ms"]) == 1
    assert entries[against]["ratio"]["median"] == 1


def test_a_peer_that_is_not_installed_says_so() -> None:
    missing = modules._missing("relpos_without_such_a_library")()
    assert missing is not None
    assert missing.startswith("relpos_without_such_a_library cannot be imported: No module named")
    assert modules._missing("json")() is None


def test_rounds_are_interleaved_and_a_failure_stops_one_peer_alone() -> None:
    order: list[str] = []

    def recorded(name: str) -> Workload:
        def forward() -> Tensor:
            order.append(name)
            if name == "b" and order.count("b") == 2:
                raise RuntimeError("no compiler\nat all")
            return torch.zeros(1)

        return Workload(forward)

    times, reasons = measure.interleaved({name: recorded(name) for name in "abc"}, warm=1, rounds=3)
    assert reasons == {"b": "RuntimeError: no compiler"}
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 0, "c": 3}
    assert order == [*"abc", *"bca", *"ac", *"ca"]


def test_ratios_are_taken_within_rounds() -> None:
    peer = named(SMALL, "sdpa-dense")
    entry = measure._entry(SMALL, peer, None, [2.0, 9.0, 8.0], [1.0, 3.0, 4.0], None)
    assert entry["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.5}
    assert entry["ms"] == {"median": 8.0, "q1": 5.0, "q3": 8.5}
    red = measure._entry(SMALL, peer, None, [2.0], [1.0], "red")
    assert (red["ms"], red["ratio"], red["rounds_ms"], red["reason"]) == (None, None, [], "red")


@pytest.mark.slow
def test_no_speed_where_the_check_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: Any) -> Workload:
        q, k, v = inputs.qkv
        return Workload(lambda: q + 0 * (k + v), (q, k, v), inputs.gradient)

    broken = tuple(
        replace(peer, build=wrong) if peer.name == "sdpa-dense" else peer for peer in modules.peers_of(SMALL, ())
    )
    monkeypatch.setattr(measure, "peers_of", lambda case, engines: broken)
    entries = {entry["peer"]: entry for entry in measure.time_case(SMALL, (), 2, 1, lambda _: None)}
    assert entries["sdpa-dense"]["ms"] is None
    assert entries["sdpa-dense"]["rounds_ms"] == []
    assert "instead of" in entries["sdpa-dense"]["reason"] or "error" in entries["sdpa-dense"]["reason"]
    assert entries["sdpa-free"]["ms"] is not None


def test_what_would_not_fit_is_not_tried() -> None:
    long = Case("line", (16384,), "step")
    dense = named(long, "sdpa-dense")
    assert peers.pairs(long) == 8 * 2**30
    assert "needs about 64 GiB, 23 GiB are free" in str(measure.lacks_room(dense, long, 23 * 2**30))
    assert measure.lacks_room(dense, long, 100 * 2**30) is None
    assert "about 16 GiB" in str(measure.lacks_room(dense, replace(long, what="forward"), 20 * 2**30))
    assert measure.lacks_room(named(long, "sdpa-free"), long, 1) is None
    assert measure.lacks_room(dense, long, None) is None
    assert measure.lacks_room(engine_peer("sdpa"), long, 2**30) is not None
    assert measure.lacks_room(engine_peer("streaming"), long, 2**30) is None


def test_a_bias_that_is_read_as_a_view_needs_no_dense_scores() -> None:
    (long,) = find_cases("line-16384-float32-forward")
    sdpa, step = engine_peer("sdpa"), replace(long, what="step")
    assert sdpa.needs(long) == sdpa.needs(replace(long, causal=True)) == 0
    assert sdpa.needs(step) == peers.dense_bytes(step) > 2**35
    assert sdpa.needs(replace(long, batch=512, sizes=(64,))) > 0  # turning so many queries round would cost more


def test_long_cases_have_fewer_rounds() -> None:
    assert measure.rounds_of(Case("line", (8192,)), 7) == (1, 3)
    assert measure.rounds_of(Case("line", (4096,)), 7) == (2, 7)
    assert measure.rounds_of(Case("line", (16384,)), 2) == (1, 2)
    assert measure.rounds_of(Case("line", (256,)), 1) == (1, 1)
    assert measure.rounds_of(Case("line", (256,)), 7) == (10, 280), "small calls want many, of which the least counts"
    assert measure.rounds_of(Case("shaw", (256,)), 7) == (2, 21)


MEMORY = """
from relpos.bench.cases import Case
from relpos.bench.measure import memory_of
case = Case("line", (1024,), "step")
print(memory_of(case, "sdpa-free", ("auto",), 1), memory_of(case, "sdpa-dense", ("auto",), 1))
"""


@pytest.mark.slow
def test_memory_counts_what_a_call_makes_and_not_its_inputs(loaded: Loaded) -> None:
    done = loaded.run("-c", MEMORY)
    assert done.returncode == 0, done.stderr
    free, dense = map(float, done.stdout.split())
    tensor, scores = 2, 8 * 1024 * 1024 * 4 / 2**20  # q, k, v, their gradients and the output have 2 MiB each
    assert 3 * tensor <= free <= 10 * tensor
    assert 2 * scores <= dense <= 12 * scores


def entry(case: str, peer: str, ratio: float | None = None, **more: Any) -> dict[str, Any]:
    """An entry of results, as `time_case` makes them."""
    spread = None if ratio is None else {"median": ratio, "q1": ratio, "q3": ratio}
    ms = None if ratio is None else {"median": 10 * ratio, "q1": ratio, "q3": ratio}
    plain = {
        "case": case, "peer": peer, "title": peer, "backend": None, "ms": ms, "ratio": spread, "against": "sdpa-free",
        "rounds_ms": [] if ratio is None else [10 * ratio] * 3, "extra_mib": None, "reason": None,
    }  # fmt: skip
    return {**plain, **more}


def test_targets_are_those_of_the_issue() -> None:
    on_cpu = [target for target in targets() if not target.case.endswith("cuda")]
    asked = {target.case: target.at_most for target in on_cpu if target.measure == "time" and target.peers}
    assert asked == {
        "line-4096-float32-forward": 1.05, "line-4096-float32-step": 1.25, "line-4096-float32-step-causal": 1.25,
        "grid-64x64+1-float32-step": 1.35, "line-4096-bfloat16-forward": 0.5, "line-4096-bfloat16-step": 0.7,
        "layer-shaw-2048-float32-step": 0.5, "layer-transformer_xl-2048-float32-step": 0.5,
        "layer-deberta-2048-float32-step": 0.5, "layer-deberta-512-float32-step": 0.9,
        "layer-grid-32x32+1-float32-step": 1.35,
        "grid-8x8+1-float32-step-b8-h4-d16": 1.1, "grid-7x7-float32-step-b32": 1.05,
        "grid-14x14+1-float32-step-b8": 1.05,
    }  # fmt: skip
    more = {(target.case, target.engine): target.at_most for target in on_cpu if target.measure == "us"}
    one, few = "t5-64-float32-forward-q1", "64-float32"
    assert more == {
        (one, "terms"): 50, (one, "auto"): 150, (one, "decoding"): 70, (f"line-{few}-forward", "auto"): 60,
        (f"t5-{few}-forward", "auto"): 160, (f"line-{few}-step", "auto"): 200, (f"t5-{few}-step", "auto"): 200,
    }  # fmt: skip
    (memory,) = (target for target in targets() if target.measure == "GiB")
    assert (memory.case, memory.at_most) == ("line-16384-float32-step", 0.6)
    best = [target for target in on_cpu if target.measure == "time" and not target.peers]
    assert len(best) == 8
    assert {target.at_most for target in best} == {1.05}


def test_targets_on_a_gpu_are_those_of_the_issue() -> None:
    asked = {(target.case, target.peers, target.measure): target.at_most for target in targets()}
    free, both = ("sdpa-free",), ("sdpa-free", "sdpa-cudnn")
    for width in ("", "-d128"):
        forward, step = (f"line-8192-bfloat16-{what}{width}-cuda" for what in ("forward", "step"))
        assert [asked[forward, peers, "time"] for peers in (("relpos-free",), free, both)] == [1.2, 1.15, 1.5]
        assert [asked[step, peers, "time"] for peers in (("relpos-free",), free, both)] == [1.3, 1.4, 1.9]
    step = "line-8192-bfloat16-step-cuda"
    assert (asked[step, ("flex",), "time"], asked[step, free, "memory"]) == (0.5, 1.1)
    assert asked["grid-64x64+1-bfloat16-step-cuda", free, "time"] == 1.6
    for side in (7, 8):
        assert asked[f"grid-{side}x{side}-bfloat16-step-b4096-cuda", ("sdpa-dense",), "time"] == 0.7
    assert {target.case for target in targets()} <= set(every_case())


def peers_with(**ratios: float | None) -> list[tuple[str, float | None, dict[str, Any]]]:
    return [(name.replace("_", "-"), ratio, {}) for name, ratio in ratios.items()]


@pytest.mark.parametrize(
    ("case", "entries", "rows"),
    [
        ("line-4096-float32-step", peers_with(sdpa_free=1.0, relpos_auto=1.25), [(1.25, True, None)]),
        ("line-4096-float32-step", peers_with(sdpa_free=1.0, relpos_auto=1.251), [(1.251, False, None)]),
        (
            "line-4096-float32-step",
            [("sdpa-free", 1.0, {}), ("relpos-auto", None, {"reason": "red"})],
            [(None, None, "red")],
        ),
        (
            "grid-7x7-float32-step-b1024",  # against the best of the other engines
            [
                *peers_with(relpos_auto=2.1, relpos_sdpa=2.0, relpos_streaming=3.0, sdpa_dense=0.5),
                ("relpos-reference", None, {"reason": "red"}),
            ],
            [(1.05, True, None)],
        ),
        (
            "grid-7x7-float32-step-b1024",
            peers_with(relpos_auto=1.0),
            [(None, None, "other engines did not run")],
        ),
        ("line-16384-float32-step", [("relpos-auto", 9.0, {"extra_mib": 600.0})], [(0.586, True, None)]),
        ("line-16384-float32-step", [("relpos-auto", 9.0, {"extra_mib": 620.0})], [(0.605, False, None)]),
        (
            "t5-64-float32-forward-q1",  # microseconds between the least of all rounds
            [
                ("sdpa-ready", 1.0, {"rounds_ms": [0.05, 0.01, 0.09]}),
                ("relpos-decoding", 1.0, {"rounds_ms": [0.3, 0.2, 0.08]}),
            ],
            [(None, None, ...), (None, None, ...), (70.0, True, None)],
        ),
        (
            "line-8192-bfloat16-step-cuda",
            [
                ("sdpa-free", 1.0, {"extra_mib": 100.0}),
                *peers_with(sdpa_cudnn=0.5, relpos_free=0.8, flex=4.0),
                ("relpos-auto", 1.0, {"extra_mib": 120.0}),
            ],
            [(1.25, True, None), (1.0, True, None), (2.0, False, None), (0.25, True, None), (1.2, False, None)],
        ),
    ],
)
def test_a_run_is_judged(case: str, entries: list[tuple[str, float | None, dict[str, Any]]], rows: list[Any]) -> None:
    """By what was reached, whether that is enough, and why there is nothing to judge."""
    judged = judge([entry(case, peer, ratio, **more) for peer, ratio, more in entries])
    for row, (reached, met, reason) in zip(judged, rows, strict=True):
        assert row["reached"] == (reached if reached is None else pytest.approx(reached))
        assert row["met"] is met
        assert reason is ... or row["reason"] == reason


def line_entries() -> list[dict[str, Any]]:
    return [
        entry(f"line-{n}-float32-step", peer, ratio, extra_mib=5 + n / 64)
        for n in LENGTHS
        for peer, ratio in (("sdpa-free", 1.0), ("relpos-auto", 1.2))
    ]


def test_memory_is_fitted_by_a_line() -> None:
    fits = memory_fits(line_entries(), LENGTHS)
    assert fits["relpos-auto"]["kib_a_token"] == 16
    assert fits["relpos-auto"]["mib_at_0"] == 5
    assert fits["relpos-auto"]["largest_relative_residual"] == 0
    square = [entry(f"line-{n}-float32-step", "sdpa-dense", extra_mib=n * n / 1024) for n in LENGTHS]
    assert memory_fits(square, LENGTHS)["sdpa-dense"]["largest_relative_residual"] > 1
    assert memory_fits(line_entries()[:4], LENGTHS) == {}


def results() -> dict[str, Any]:
    entries = line_entries()
    entries[1]["reason"] = "output of line-256: RMS error 0.5, allowed 0.1"
    entries[1]["ms"] = entries[1]["ratio"] = None
    return {
        "entries": entries,
        "cases": {case.name: asdict(case) for n in LENGTHS for case in [Case("line", (n,), "step")]},
        "targets": judge(entries),
        "memory_fits": memory_fits(entries, LENGTHS),
        "environment": {"processor": "a processor", "torch": torch.__version__},
        "settings": {"threads": 2},
    }


def test_the_table_says_it_all() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(results()))
    text = " ".join(console.export_text().split())
    assert "line-16384-float32-step" in text
    assert "RMS error 0.5, allowed 0.1" in text
    assert "1.25 1.200 yes" in text
    assert "Memory of relpos-auto: 5 MiB + 16 KiB per token, at most 0% off, over N = 256 to 16,384" in text
    assert "Memory of sdpa-free" not in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    found = results()
    ratios, extra = curves(found, "step")
    assert ratios["relpos-auto"] == [(n, 1.2) for n in LENGTHS[1:]]
    assert extra["relpos-auto"][0] == (256, 9.0)
    assert drawable(found) == ("step",)
    assert curves(found, "forward") == ({}, {})
    name = "line-512-float32-step"
    for change in ({"causal": True}, {"dtype": "bfloat16"}, {"position": "shaw"}, {"layer": True}, {"batch": 2}):
        other = {**found, "cases": {**found["cases"], name: {**found["cases"][name], **change}}}
        assert [n for n, _ in curves(other, "step")[0]["sdpa-free"]] == [n for n in LENGTHS if n != 512]
    for peer, drawn in (("relpos-cold", False), ("relpos-triton", True)):  # the second without a look of its own
        renamed = [entry if entry["peer"] != "relpos-auto" else {**entry, "peer": peer} for entry in found["entries"]]
        assert (peer in curves({**found, "entries": renamed}, "step")[0]) is drawn
    save_picture(found, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert drawable({**found, "entries": found["entries"][:2]}) == ()


@pytest.mark.slow
def test_vectors_that_far_offsets_share_are_summed_as_well_as_the_reference_does() -> None:
    (case,) = find_cases("shaw-512-float32-step")
    assert check.faults(case, [engine_peer("streaming")], ["streaming"]) == {}
