"""How to run again and how to cite: the very words."""

import shlex
from dataclasses import fields, replace
from typing import Any

import pytest

from relpos.report.command import bibtex, citation, command_line, requested
from relpos.results import read
from relpos_command.parsing import parse
from relpos_command.requests import CompareCommand, CompareRequest


def test_command_asks_for_the_same_comparison(make: Any) -> None:
    assert command_line(read(make(("none", "learned")))) == (
        "relpos compare --data digits --positions none,learned --seeds 3 --steps 400 --device cpu --precision float32 "
        "--out DIR"
    )
    quick = make(quick=True)
    quick["settings"]["recipe"]["steps"] = 7
    assert "--steps 7 --quick " in command_line(read(quick))


def test_command_names_the_images_and_how_they_were_read(make: Any) -> None:
    results = make(("none",))
    results["settings"]["task"] = "images"
    results["settings"]["task_options"] = {
        "images": "/my pictures",
        "image_size": [64, 96],
        "patch": [8, 8],
        "bad_images": "skip",
        "rotate": True,
        "max_pixels": 5000,
        "contents": "a fingerprint",
    }
    assert command_line(read(results)).startswith(
        "relpos compare --data '/my pictures' --image-size 64x96 --patch 8 --bad-images skip --rotate "
        "--max-pixels 5000 --positions none "
    )
    results["settings"]["task_options"] = {"images": "here", "rotate": False, "patch": None}
    assert command_line(read(results)).startswith("relpos compare --data here --positions none ")


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("code/mine.py:build", "mine.py:build, sha256 0123456789ab"),
        ("my code, new/it's.py:build", "it's.py:build, sha256 0123456789ab"),
        ('hf:a, b/it\'s "c"', 'hf:a, b/it\'s "c", transformers 5.13.1, sha256 0123456789ab'),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224, timm 1.0.28"),
        ("swin", "swin"),
    ],
)
def test_command_names_a_model_as_it_was_typed(make: Any, given: str, held: str) -> None:
    results = make(("none",))
    results["settings"] |= {"model": held, "given": {"model": given}}
    words = shlex.split(command_line(read(results)))
    assert words[words.index("--model") + 1] == given
    del results["settings"]["given"]  # of an earlier relpos, which kept no folder of a file
    words = shlex.split(command_line(read(results)))
    assert words[words.index("--model") + 1] == given.rpartition("/")[2] if ".py:" in given else given


def test_a_call_in_python_names_a_model_as_it_was_given(make: Any) -> None:
    results = make(("none",))
    given = {"model": "code/mine.py:build"}
    results["settings"] |= {"model": "mine.py:build, sha256 0123456789ab", "given": given}
    results["settings"] |= {"step": "step, sha256 0123456789ab"}
    called = command_line(read(results))
    assert "    model='code/mine.py:build',\n" in called
    assert "    step=step,\n" in called


def test_command_names_the_file_of_a_mechanism(make: Any) -> None:
    results = make(("none", "t5"))
    results["settings"]["positions"] = ["none", "mine.TwoSlope"]
    results["settings"] |= {"given": {"mine.TwoSlope": "code/mine.py:TwoSlope"}, "sources": {"mine.TwoSlope": "x"}}
    for entries in ("records", "mechanisms", "costs"):
        for one in results[entries]:
            for key in ("position", "name"):
                if one.get(key) == "t5":
                    one[key] = "mine.TwoSlope"
    assert " --positions none,code/mine.py:TwoSlope " in command_line(read(results))


def test_command_tells_a_file_from_what_comes_along(make: Any) -> None:
    results = make(("none",))
    results["settings"] |= {"task": "text", "task_options": {"text": "digits"}}
    assert " --data ./digits " in command_line(read(results))
    results["settings"]["task_options"] = {"text": "more/digits"}
    assert " --data more/digits " in command_line(read(results))


def typed(request: CompareRequest) -> CompareCommand:
    """The same request as the command has it: on this machine."""
    return CompareCommand(**{one.name: getattr(request, one.name) for one in fields(request)})


@pytest.mark.parametrize(
    "changes",
    [
        {"quick": True, "changes": {"batch_size": 8, "learning_rate": 0.01, "norm": "rmsnorm", "weight_decay": 0.5}},
        {"model": "timm:vit", "step": "a b.py:f", "given": {"model": "timm:vit", "step": "x/a b.py:f"}},
        {"task": "images", "task_options": {"images": "photos", "patch": [4, 4], "rotate": True, "max_pixels": 9}},
        {
            "task": "text",
            "task_options": {"text": "a.txt", "tokenizer": "hf:a b", "documents": "packed", "tokens": "0"},
        },
    ],
)
def test_the_command_asks_for_the_request(make: Any, changes: dict[str, Any]) -> None:
    """What is parsed of the command is the request that it was written from."""
    results = make(("none", "learned"))
    results["settings"] |= changes
    found = read(results)
    words = shlex.split(command_line(found))
    asked = requested(found.settings)
    assert parse(words[1:]).request == typed(replace(asked, out="DIR"))
    assert asked.positions == ("none", "learned")


def test_the_command_names_schedules_for_a_shell(make: Any) -> None:
    """A shell would read a home folder of `~`."""
    found = read(make(("none",)))
    found = replace(found, settings=replace(found.settings, positions=["rotary_2d~none", "none"]))
    line = command_line(found)
    assert " --positions 'rotary_2d~none,none' " in line
    assert parse(shlex.split(line)[1:]).request == typed(replace(requested(found.settings), out="DIR"))


def test_citation_and_bibtex_name_the_version(make: Any) -> None:
    results = make(("none", "learned"))
    cited = citation(read(results))
    assert cited.startswith("relpos 0.1.0, comparison of none, learned on Handwritten digits (3 seeds, ")
    entry = bibtex(read(results))
    assert entry.startswith("@software{relpos,\n  author  = {{relpos developers}},")
    assert "version = {0.1.0}" in entry
    assert entry.count("{") == entry.count("}")
