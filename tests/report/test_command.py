"""How to run again and how to cite: the very words."""

from typing import Any

from relpos.report.command import bibtex, citation, command_line
from relpos.results import read


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


def test_citation_and_bibtex_name_the_version(make: Any) -> None:
    results = make(("none", "learned"))
    cited = citation(read(results))
    assert cited.startswith("relpos 0.1.0, comparison of none, learned on Handwritten digits (3 seeds, ")
    entry = bibtex(read(results))
    assert entry.startswith("@software{relpos,\n  author  = {{relpos developers}},")
    assert "version = {0.1.0}" in entry
    assert entry.count("{") == entry.count("}")
