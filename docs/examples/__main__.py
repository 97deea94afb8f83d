"""Write docs/examples.md and its pictures again: `python docs/examples`, a few seconds."""

from pathlib import Path

from page import page
from pictures import draw

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    (HERE.parent / "examples.md").write_text(page(), encoding="utf-8")
    for path in draw(HERE):
        print(path)
