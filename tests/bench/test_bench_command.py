"""`relpos bench`: a run from end to end, what it lists, and that it goes on where it was cut short."""

import json
from pathlib import Path
from typing import Any

import pytest

from relpos.bench import run
from relpos.bench.cases import Case, every_case, families
from relpos.bench.run import Bench, BenchSettings
from relpos.cli import main
from relpos.comparison.store import OtherSettingsError
from relpos.comparison.workers import Event, WorkerError, WorkerTask

Captured = pytest.CaptureFixture[str]


def test_it_lists_every_case_and_runs_none(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["bench", "--list"])
    words = capsys.readouterr().out.split()
    assert set(every_case()) <= set(words)
    assert set(families()) <= set(words)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_quick_run_from_end_to_end(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "QUICK_TOKENS", 32)
    typed = ["bench", "--cases", "line-256-float32-step", "--quick", "--threads", "1", "--engines", "sdpa"]
    main(typed)
    (folder,) = (tmp_path / "runs").iterdir()
    found = json.loads((folder / "results.json").read_text())
    assert found["settings"]["cases"] == ["line-32-float32-step"]
    assert (found["settings"]["repeats"], found["settings"]["threads"]) == (1, 1)
    assert {"relpos", "torch", "processor", "cores", "transformers", "timm", "capability"} <= set(found["environment"])
    entries = {entry["peer"]: entry for entry in found["entries"]}
    assert set(entries) == {
        "sdpa-free", "relpos-sdpa", "sdpa-dense", "sdpa-ready", "relpos-cold", "relpos-changed", "matmul"
    }  # fmt: skip
    for name, entry in entries.items():
        assert entry["reason"] is None
        assert entry["ms"]["median"] > 0
        assert entry["ratio"]["q1"] <= entry["ratio"]["q3"]
        assert (entry["extra_mib"] is None) == (name == "matmul")
    assert entries["relpos-sdpa"]["backend"] == "sdpa"
    printed = capsys.readouterr().out
    assert "1 cases on 1 threads, in" in printed
    assert "Done: measure memory of line-32-float32-step, " in printed
    main(typed)
    assert "This benchmark is finished. Its results, from" in capsys.readouterr().out
    assert json.loads((folder / "results.json").read_text()) == found


def settings(**more: Any) -> BenchSettings:
    return BenchSettings.make((Case("line", (8,)),), ("sdpa",), 1, threads=1, **more)


def test_results_of_other_settings_or_another_source_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bench(settings(), tmp_path / "a")
    Bench(settings(), tmp_path / "a")
    with pytest.raises(OtherSettingsError, match="memory was True, now False"):
        Bench(settings(memory=False), tmp_path / "a")
    monkeypatch.setattr(run, "fingerprint", lambda: "changed")
    with pytest.raises(OtherSettingsError, match=r"source was '[0-9a-f]{8}', now 'changed'"):
        Bench(settings(), tmp_path / "a")


def test_a_process_that_dies_costs_its_own_figure_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def dying(tasks: list[WorkerTask], at_once: int) -> Any:
        asked.extend(task.name for task in tasks)
        yield Event(tasks[0], "started")
        raise WorkerError("it failed:\nthe process ended with code -9 and said nothing")

    monkeypatch.setattr(run, "run_tasks", dying)
    bench = Bench(settings(), tmp_path / "a")
    found = bench.run()
    assert asked == ["time--line-8-float32-forward"], "no memory is measured of what has no time"
    assert {entry["reason"] for entry in found["entries"]} == {
        "the process was killed, most likely because memory ran out"
    }
    assert not bench.tasks(bench.settings.cases[0])

    def broken(tasks: list[WorkerTask], at_once: int) -> Any:
        yield Event(tasks[0], "started")
        raise WorkerError("it failed:\nKeyError: 3")

    monkeypatch.setattr(run, "run_tasks", broken)
    with pytest.raises(WorkerError, match="KeyError"):
        Bench(settings(), tmp_path / "b").run()


def test_all_engines_run_where_windows_are_many() -> None:
    windows = families()["windows"][0]
    plain = BenchSettings.make((windows,))
    assert plain.engines_of(windows)[0] == "auto"
    assert {"sdpa", "streaming", "reference"} <= set(plain.engines_of(windows))
    assert plain.engines_of(Case("line", (8,))) == ("auto",)
    assert BenchSettings.make((windows,), ("sdpa",)).engines_of(windows) == ("sdpa",)


def test_a_quick_run_without_names_has_few_cases_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bench] = []
    monkeypatch.setattr("relpos.cli.bench_verb.measure", lambda bench, console: made.append(bench))
    for number, more in enumerate(([], ["--cases", "small"])):
        main(["bench", "--quick", "--out", str(tmp_path / str(number)), *more])
    assert [len(one.settings.cases) for one in made] == [3, 8]
    assert [one.settings.memory for one in made] == [False, True]
    assert sum(len(made[0].tasks(case)) for case in made[0].settings.cases) == 3


def test_quick_cases_are_shrunk_and_run_once() -> None:
    quick = BenchSettings.make(families()["lengths"], repeats=7, quick=True)
    assert quick.repeats == 1
    assert {case.sizes for case in quick.cases} == {(256,)}
    assert len(quick.cases) == len(set(quick.cases)) == 6
