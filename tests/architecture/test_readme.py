"""What README.md and CONTRIBUTING.md claim, as far as a test can check it."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from source import ROOT

import relpos
from relpos.cli import VERBS, main
from relpos.core import Grid, Sequence
from relpos.position import Site, create_position, presets
from relpos_command.option import add_options

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
MECHANISMS = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_two_commands_name_what_exists() -> None:
    commands = [line for block in blocks(TEXT, "bash") for line in block.splitlines()]
    assert len(commands) == 2, "two commands: one installs and compares, one installs and tests"
    assert commands[0].endswith("relpos compare")
    assert "pytest" in commands[1]
    extras = project()["optional-dependencies"]
    for command in commands:
        for constraint in re.findall(r"-c (\S+)", command):
            assert (ROOT / constraint).is_file()
        for named in re.findall(r"\[([\w,]+)\]", command):
            assert set(named.split(",")) <= set(extras)  # type: ignore[call-overload]


def test_ci_runs_the_command_that_readme_marks() -> None:
    assert "<!-- test command -->\n```bash\n" in TEXT


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 170  # with a table of speed for each kind of device


@pytest.mark.parametrize("example", [*blocks(TEXT, "python"), *blocks(COMMAND, "python")])
def test_the_library_examples_run(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert len([line for line in example.splitlines() if line.strip()]) <= 8
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "print(" in example and not torch.cuda.is_available():
        assert printed == re.split(re.escape(example) + r"```\n+```text\n", TEXT)[1].split("```")[0]


@pytest.mark.slow
def test_the_quick_comparison_prints_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line, but for figures, the order of mechanisms, and what three points leave out.

    Memory is not measured, which takes processes of its own, and what was learned is not drawn: no line has either.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("relpos.comparison.cost.memory_sizes", lambda *_: ())
    monkeypatch.setattr("relpos.report.page.learned_svgs", lambda *_, **__: [])
    main(["compare", "--quick", "--steps", "2"])

    def shape(text: str) -> list[str]:
        return [" ".join(re.sub(r"-[0-9a-f]{8}/|[\d,.]*\d", "#", line).split()) for line in text.splitlines()]

    (shown,) = [block for block in blocks(TEXT, "text") if block.startswith("Comparing")]
    printed = capsys.readouterr().out
    missing = set(shape(shown)) - {"..."} - set(shape(printed))
    assert not missing, f"of README, {missing} are not among what it prints now:\n{printed}"


def test_the_ten_best_known_are_made_as_their_row_says() -> None:
    table = TEXT.split("## Position mechanisms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w+]+)` \|.*\| `(\w+\(.*?\))` \|", table, flags=re.MULTILINE)
    assert len(rows) == 10
    for name, call in rows:
        tokens = Grid(14, 14) if name.endswith("_2d") else Sequence(256)
        assert call == repr(create_position(name, num_heads=8, head_dim=64, queries=tokens))
    assert f"[All {len(presets())}](docs/mechanisms.md)" in table


def test_the_table_has_every_mechanism_and_no_other() -> None:
    assert sorted(re.findall(r"^\| `([\w+]+)` \|", MECHANISMS, flags=re.MULTILINE)) == sorted(presets())


def test_the_table_has_aliases_and_what_each_is_written_out() -> None:
    for name, preset in presets().items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*$", MECHANISMS, flags=re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        tokens = Sequence(256) if 1 in preset.token_axes else Grid(14, 14)
        assert cells[1] == ", ".join(f"`{alias}`" for alias in preset.aliases)
        assert cells[-1] == f"`{create_position(name, num_heads=8, head_dim=64, queries=tokens)!r}`"


def test_the_table_says_how_each_grows() -> None:
    site = Site(num_heads=2, head_dim=4, embed_dim=8, queries=Grid(4, 4))
    for name, preset in presets().items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*$", MECHANISMS, flags=re.MULTILINE)
        for rule in preset.build(site).growth:
            assert rule in row, f"the row of {name} leaves out {rule!r}"


def test_the_table_has_every_engine_and_no_other() -> None:
    table = TEXT.split("## Engines")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == sorted(relpos.backends())


def test_the_tables_of_speed_are_those_of_the_results() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    assert script["written"](TEXT) == TEXT, "run benchmarks/readme.py"
    blank = re.sub(r"(<!-- benchmark cpu -->\n).*?<!-- end -->", r"\1<!-- end -->", TEXT, flags=re.DOTALL)
    assert blank != TEXT
    assert script["written"](blank) == TEXT


def test_a_table_of_a_gpu_stands_there_once_it_is_measured(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    results = (ROOT / "benchmarks" / "results" / "attention-cpu.json").read_text(encoding="utf-8")
    for device in ("cpu", "cuda"):
        (tmp_path / f"attention-{device}.json").write_text(results, encoding="utf-8")
    both = script["written"](TEXT, tmp_path)
    assert both.count("<!-- end -->") == 2
    assert "<!-- benchmark cuda -->\n| case | relpos |" in both
    assert "its kernels without a bias" not in both.split("<!-- benchmark cuda -->")[1], "not measured there"
    assert script["written"](both, tmp_path) == both
    assert script["written"](both) == TEXT


def test_every_verb_in_the_text_exists() -> None:
    for page in PAGES:
        for verb in re.findall(r"\brelpos ([a-z]+)\b", "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))):
            assert verb in VERBS, f"{page.name} names relpos {verb}"


def test_options_in_the_synopsis_exist() -> None:
    from jsonargparse import ArgumentParser

    (synopsis,) = [block for block in blocks(COMMAND, "") if "relpos compare" in block]
    for line in synopsis.splitlines():
        verb = line.split()[1]
        parser = ArgumentParser()
        add_options(VERBS[verb].request, parser)
        known = {option for action in parser._actions for option in action.option_strings}
        options = set(re.findall(r"--[a-z-]+", line))
        assert options <= known, f"the synopsis names {options - known}"
        own = known - {"-h", "--help", "--print_config", "--config", "--print_shtab", "--debug"}
        if verb == "compare":
            assert own <= options, f"the synopsis leaves out {own - options}"


def test_local_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target and not target.startswith(("atlas/", "../atlas/", "explorer")):  # generated
                assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_versions_agree() -> None:
    assert project()["version"] == relpos.__version__
    assert relpos.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_are_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    for pin in pins:
        assert re.fullmatch(r"[\w.\-]+==[\w.+]+( *;.*)?", pin), pin
