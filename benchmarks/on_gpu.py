"""All that a GPU is asked, within ten minutes, on a machine that has no network: tests, checks, tiles, speed, models.

    python benchmarks/on_gpu.py FOLDER [--parts tests,check,tiles] [--seconds 580] [--wheels FOLDER]

Every result is a line of FOLDER/measured.jsonl as soon as it is there: cut off at any moment, the run has lost nothing.
Each part is a process of its own with a share of the seconds, and is ended with it; what a part leaves, the next ones
have. Tests run side by side; what is timed runs alone. Kernels of candidate tiles are compiled in processes side by
side before they are timed. `gpu_report.py` then says what was found.

--wheels: what the machine lacks, from `pip download -d FOLDER pytest pytest-xdist jaxtyping transformers timm`.
--dry: every part on the CPU at small sizes, with Triton's interpreter, to see that none fails before a GPU is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = {"tests": 150, "check": 60, "tiles": 140, "attention": 80, "short": 25, "retrofits": 85, "flex": 40}
"""In order, and their shares of the time."""
TESTS = "tests/engines/test_gpu.py"
_LINES = "RELPOS_GPU_LINES"
"""The environment variable that tells tests where to write."""


def _device(asked: argparse.Namespace) -> str:
    return "cpu" if asked.dry else "cuda"


class Lines:
    """A file of results, each written at once, and how many seconds are left."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.stop = path, time.monotonic() + seconds

    def __call__(self, part: str, **result: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **result}) + "\n")
        print(part, *(f"{name}={value}" for name, value in result.items() if not isinstance(value, list)), flush=True)

    def left(self) -> float:
        return self.stop - time.monotonic()


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: a line for every test that has ended, with what it says if it failed."""
    path = os.environ.get(_LINES)
    ended = report.when == "call" or report.outcome != "passed"
    if path is None or not ended or "PYTEST_XDIST_WORKER" in os.environ:
        return
    said = "" if report.passed else str(report.longrepr)[-4000:]
    with Path(path).open("a", encoding="utf-8") as file:
        line = {"part": "tests", "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        file.write(json.dumps({**line, "said": said}) + "\n")


def tests(lines: Lines, asked: argparse.Namespace) -> None:
    """The tests that only a GPU can run, for as long as there is time."""
    limit = lines.left() - 2  # before this part is ended itself, which would not end pytest's processes
    began = time.monotonic()
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    pytest = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-m", "gpu", TESTS]
    command = [*pytest, "-n", str(asked.processes), "--dist", "worksteal"]
    told = {"PYTHONPATH": path, _LINES: str(lines.path.absolute()), "RELPOS_GPU_TESTS_ON": _device(asked)}
    process = subprocess.Popen(
        [*command, "-p", "on_gpu", *(["-k", asked.tests] if asked.tests else [])], cwd=ROOT,
        env={**os.environ, **told}, start_new_session=True,
    )  # fmt: skip
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(process.pid, 9)
        process.wait()
    lines("tests", status=status, seconds=round(time.monotonic() - began, 1))


def check(lines: Lines, asked: argparse.Namespace) -> None:
    """`relpos check` of the engines that are for GPUs, a line for each kind of call."""
    import torch

    from relpos.bench.engines import check as rows_of

    for row in rows_of(["sdpa"] if asked.dry else ["triton", "flex"], only=[torch.device(_device(asked))]):
        call = f"{row.engine}, {row.dtype}, {row.kind}"
        lines("check", call=call, lack=row.lack, fault=None if row.lack else row.fault and str(row.fault))
        if lines.left() < 1 or asked.dry:
            return


def attention(lines: Lines, asked: argparse.Namespace) -> None:
    """The cases that have a target, each engine beside PyTorch's own kernels."""
    from relpos.bench.cases import find_cases
    from relpos.bench.measure import time_case
    from relpos.bench.peers import FLEX
    from relpos.bench.run import surroundings

    lines("attention", surroundings=surroundings(_device(asked)))
    for case in find_cases("line-256-float32-forward" if asked.dry else asked.cases):
        if lines.left() < 15:
            return
        engines = ("auto",) if case.batch == 1 or asked.dry else ("triton", "sdpa")
        entries = time_case(case, engines, asked.repeats, 4, lambda what: None, leave_out=(FLEX,))
        for entry in entries:
            lines("attention", **entry)


def candidates() -> list[tuple[str, int, tuple[int, int, int, int]]]:
    """Kernels, widths and tiles: those of `tune_triton` that are neither small nor deep."""
    from tune_triton import KINDS
    from tune_triton import candidates as every

    return [
        (kind, width, shape)
        for width in (64, 128)
        for kind in KINDS
        for shape in every(kind)
        if min(shape[:2]) >= 32 and shape[3] <= 3
    ]


def tiles(lines: Lines, asked: argparse.Namespace) -> None:
    """Every kernel under every size of tile that fits: compiled side by side, then timed alone."""
    began, work = time.monotonic(), candidates()[:: 40 if asked.dry else 1]
    dry, count = ["--dry"] * asked.dry, 1 if asked.dry else asked.processes
    children = [
        subprocess.Popen([sys.executable, __file__, str(asked.folder), "--compile", f"{number}/{count}",
                          "--seconds", str(max(10.0, lines.left() / 2)), *dry], cwd=ROOT)
        for number in range(count)
    ]  # fmt: skip
    for child in children:
        child.wait()
    lines("tiles", candidates=len(work), compiled_in=round(time.monotonic() - began, 1))
    _each_tile(work, lines, lines, _device(asked), timed=True)


def _each_tile(work: list[Any], lines: Lines, say: Callable[..., None], device: str, *, timed: bool) -> None:
    """Run every candidate, and time it if it gives what the tiles that stand there give."""
    import statistics

    import torch
    from tune_triton import kernel_of

    from relpos import LineBias, Sequence, Terms
    from relpos import lines as lines_of
    from relpos.bench.measure import interleaved
    from relpos.bench.peers import Workload
    from relpos.engines.call import Call
    from relpos.engines.triton import launch

    batch, heads, tokens = (1, 1, 32) if device == "cpu" else (2, 8, 8192 if timed else 512)
    run, exact, before = None, [], None
    for kind, width, shape in work:
        if lines.left() < 3:
            return
        key = (kind, "half", width)
        if (kind, width) != before:
            line = lines_of(Sequence(tokens), device=torch.device(device))
            q, k, v = (torch.randn(batch, heads, tokens, width, device=device, dtype=torch.bfloat16) for _ in range(3))
            terms = Terms(LineBias(torch.randn(heads, line.length, device=device), line))
            run = kernel_of(kind, Call(q, k, v, terms, None, width**-0.5))
            exact, before = [x.double() for x in run()], (kind, width)
        assert run is not None
        now = launch.SHAPES[key]
        launch.SHAPES[key] = launch._shape(*shape)
        try:
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(run(), exact, strict=True)]
            if timed and max(errors) < 0.02:
                milliseconds, _ = interleaved({"tile": Workload(lambda run=run: run()[0])}, 1, 5, device)
                say("tiles", kind=kind, width=width, tile=list(shape), ms=statistics.median(milliseconds["tile"]))
        except Exception as error:  # more shared memory or registers than there are
            if timed:
                say("tiles", kind=kind, width=width, tile=list(shape), failed=repr(error)[:80])
        finally:
            launch.SHAPES[key] = now


def short(lines: Lines, asked: argparse.Namespace) -> None:
    """What a call costs beside its arithmetic: microseconds of the clock, one call after the other."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from relpos import LineBias, Sequence, T5Bias, attention
    from relpos import lines as lines_of

    device, repeats = torch.device(_device(asked)), 1 if asked.dry else 40

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def microseconds(work: Callable[[], object], count: int = repeats) -> float:
        for _ in range(5):
            work()
        found = []
        for _ in range(5):
            wait()
            began = time.perf_counter()
            for _ in range(count):
                work()
            wait()
            found.append((time.perf_counter() - began) / count * 1e6)
        return round(min(found), 1)

    for batch, tokens in ((1, 16),) if asked.dry else ((8, 64), (2, 1024)):
        line, mechanism = lines_of(Sequence(tokens), device=device), T5Bias(8).to(device)
        q, k, v = (torch.randn(batch, 8, tokens, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        values, up = torch.randn(8, line.length, device=device, requires_grad=True), torch.randn_like(q)
        index, where = line.index()[0] if line.index().dim() == 3 else line.index(), Sequence(tokens)
        forms: dict[str, tuple[Callable[[], Any], list[Any]]] = {
            "sdpa": (lambda q=q, k=k, v=v: sdpa(q, k, v), []),
            "gathered": (
                lambda q=q, k=k, v=v, values=values, index=index: sdpa(
                    q, k, v, attn_mask=values[:, index].to(q.dtype)[None]
                ),
                [values],
            ),
            **{
                f"terms, {name}": (
                    lambda q=q, k=k, v=v, values=values, line=line, name=name: attention(
                        q, k, v, position=LineBias(values, line), backend=name
                    ),
                    [values],
                )
                for name in ("triton", "sdpa", "auto")
            },
            "T5Bias, auto": (
                lambda q=q, k=k, v=v, mechanism=mechanism, where=where: attention(
                    q, k, v, position=mechanism, queries=where
                ),
                list(mechanism.parameters()),
            ),
        }
        for name, (forward, learned) in forms.items():
            if lines.left() < 3:
                return

            def step(forward: Callable[[], Any] = forward, learned: list[Any] = learned, up: Any = up) -> object:
                return torch.autograd.grad(forward(), [*leaves, *learned], up)  # noqa: B023

            with torch.no_grad():
                found = microseconds(forward)
            lines("short", batch=batch, tokens=tokens, form=name, forward_us=found, step_us=microseconds(step))


def retrofits(lines: Lines, asked: argparse.Namespace) -> None:
    """Models of other libraries, published and retrofitted."""
    from gpu_parts import each_retrofit

    each_retrofit(lines, lines.left, dry=asked.dry)


def flex(lines: Lines, asked: argparse.Namespace) -> None:
    """FlexAttention with a captured table, in tiles that fit."""
    from gpu_parts import each_flex

    each_flex(lines, lines.left, dry=asked.dry)


def run_part(part: str, seconds: float, typed: list[str], lines: Lines) -> None:
    """A part in a process of its own, which is ended with all that it started when its time is over."""
    command = [sys.executable, __file__, *typed, "--part", part, "--seconds", str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(seconds + 3)  # a part looks at its time, too
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        lines(part, ended="its time was over")
    else:
        if status:
            lines(part, failed=f"its process ended with {status}")


def install(wheels: Path, folder: Path) -> None:
    """Unpack wheels where the parts find them."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--upgrade", "--quiet"]
    subprocess.run([*pip, "--target", str(folder), *map(str, sorted(wheels.glob("*.whl")))], check=True)


def main() -> int:
    """The parts that were asked for, in order."""
    parser = argparse.ArgumentParser(description="tests, checks, tiles, speed and models on a GPU")
    parser.add_argument("folder", type=Path, help="where measured.jsonl is written")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=580, help="in all")
    parser.add_argument("--tests", default=None, help="only those that match, as pytest's -k")
    parser.add_argument("--cases", default="gpu-target", help="of `relpos bench`, for attention")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of attention, of three calls each")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="side by side")
    parser.add_argument("--wheels", type=Path, default=None, help="packages that the machine lacks")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at small sizes")
    parser.add_argument("--compile", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        print(f"expected parts of {', '.join(PARTS)}; got {unknown[0]!r}. Leave it out.", file=sys.stderr)
        return 2
    if asked.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if asked.compile or asked.part:
        lines = Lines(asked.folder / "measured.jsonl", asked.seconds)
        try:
            if asked.compile:
                number, of = map(int, asked.compile.split("/"))
                some = candidates()[number::of][: 1 if asked.dry else None]
                _each_tile(some, lines, lines, _device(asked), timed=False)
            else:
                globals()[asked.part](lines, asked)
        except Exception as error:
            lines(asked.part or "tiles", failed=repr(error)[:500])
        return 0
    import torch

    if not (asked.dry or torch.cuda.is_available()):
        print("expected a CUDA device; got none. Run this on the GPU that is asked.", file=sys.stderr)
        return 2
    asked.folder = asked.folder.absolute()
    asked.folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(asked.folder / "measured.jsonl", asked.seconds)
    paths = [
        str(ROOT / "src"),
        *([str(asked.folder / "site")] if asked.wheels else []),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if asked.wheels:
        install(asked.wheels, asked.folder / "site")
    typed = [str(asked.folder), "--cases", asked.cases, "--repeats", str(asked.repeats)]
    typed += ["--processes", str(asked.processes), *(["--tests", asked.tests] if asked.tests else [])]
    typed += ["--dry"] * asked.dry
    for number, part in enumerate(parts):
        share = PARTS[part] / sum(PARTS[one] for one in parts[number:])
        if lines.left() > 5:
            run_part(part, share * lines.left(), typed, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
