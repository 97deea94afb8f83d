"""Build the documentation site: `scripts/docs`.

    build/website/pages     the Markdown that the site is made of: docs/, and what is generated beside it
    build/website/site      the site

docs/ holds what people write. Generated at every build: the atlas (a page a mechanism), the explorer, and what lies
outside of docs/ (CONTRIBUTING.md, CHANGELOG.md). Links to other files of the repository become their paths.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from site_links import broken_links

ROOT = Path(__file__).parent.parent
HERE = ROOT / "website"
BUILD = ROOT / "build" / "website"
PAGES, SITE = BUILD / "pages", BUILD / "site"
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""What lies outside of docs/ and is a page of the site."""
OF_PYTORCH = {
    "relpos.AdamW": "PyTorch's own class: `torch.optim.AdamW`, under the name that relpos has beside its others."
}
"""Public names whose docstring is not in our source."""
LEFT_OUT = {".py", ".ipynb"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def main() -> None:
    """Stage, generate, build, check."""
    begun = time.perf_counter()
    shutil.rmtree(BUILD, ignore_errors=True)
    stage()
    from atlas_pages import write_atlas

    write_atlas(PAGES)
    staged = time.perf_counter()
    shutil.copy(HERE / "zensical.toml", BUILD / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", "zensical.toml"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=BUILD)
    if built.returncode or built.stderr.strip() not in ("", "No issues found"):
        said = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)
        raise SystemExit(f"the site was not built without a warning:\n{said[:8000]}")
    if broken := broken_links(SITE):
        raise SystemExit("broken links:\n" + "\n".join(broken))
    files = [path for path in SITE.rglob("*") if path.is_file()]
    count, size = sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files)
    ended = time.perf_counter()
    print(
        f"{SITE}: {count} pages, {size / 2**20:.1f} MiB, no broken link inside; "
        f"{staged - begun:.0f} s for what is generated, {ended - staged:.0f} s for the site"
    )


def stage() -> None:
    """Copy what people write, with its links as the site needs them."""
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file() and path.suffix not in LEFT_OUT:
            _staged(path, PAGES / path.relative_to(ROOT / "docs"))
    for name, page in OUTSIDE.items():
        _staged(ROOT / name, PAGES / page)
    shutil.copytree(HERE / "assets", PAGES / "assets")


def _staged(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".md":
        text = relinked(source.read_text(encoding="utf-8"), source, target)
        for name, said in OF_PYTORCH.items():
            text = text.replace(f"::: {name}\n", f"## {name.rpartition('.')[2]} {{ #{name} }}\n\n{said}\n")
        target.write_text(text, encoding="utf-8")
    else:
        shutil.copyfile(source, target)


def relinked(text: str, source: Path, target: Path) -> str:
    """A page whose links lead to pages of the site, where these are, and else are the path of the file."""

    def link(found: re.Match[str]) -> str:
        image, words, goal = found.groups()
        path, mark, anchor = goal.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        file = (source.parent / path).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            return found[0]  # the check of links reports it
        inside = ROOT / "docs"
        page = OUTSIDE.get(str(file.relative_to(ROOT)))
        if page is None and file.is_relative_to(inside) and file.is_file() and file.suffix not in LEFT_OUT:
            page = str(file.relative_to(inside))
        if page is None:
            return f"{words} (`{file.relative_to(ROOT)}`)"
        up = "../" * len(target.relative_to(PAGES).parent.parts)
        return f"{image}[{words}]({up}{page}{mark}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


if __name__ == "__main__":
    main()
