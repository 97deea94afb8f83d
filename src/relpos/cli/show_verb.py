"""`relpos show`: draw a position mechanism, without training, or the one in a trained model.

A model trained by relpos is loaded and drawn as a picture. Other weights are read by their parameters' names and drawn
as a page.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.free_file import free_file
from relpos.cli.progress import say
from relpos_command.option import flag_of

if TYPE_CHECKING:
    from relpos.core import Grid, Sequence
    from relpos.position import Preset
    from relpos.report.drawing.mechanism_data import View
    from relpos.report.drawing.mechanism_picture import Strip
    from relpos_command.requests import ShowRequest

HEADS, HEAD_DIM, SEED, LENGTH, GRID = 4, 16, 0, 16, (8, 8)
TOKENS_AT_MOST = 4096
LIBRARIES = ("relpos.report.drawing.mechanism_data", "relpos.report.drawing.mechanism_picture")
TRAINED_AT_MOST = 65_536
CONFIG_AT_MOST = 2**24
PAGE_ENDING = ".html"


def require_names(request: ShowRequest) -> None:
    """Raise if a named mechanism does not exist."""
    from relpos.core.checks import fail
    from relpos.position import find
    from relpos.position.base.outside import with_files

    if request.position is not None and (schedule := find(with_files(request.position)).schedule):
        names = list(dict.fromkeys(one.name for one in schedule))
        remedy = f"Draw an entry of the schedule: {' or '.join(f'relpos show {name}' for name in names)}."
        fail("one position to draw", repr(request.position), remedy)


def run(request: ShowRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.core.checks import fail
    from relpos.position.base.outside import with_files
    from relpos.report.drawing.mechanism_picture import picture, save_picture

    if request.position is not None:
        name = with_files(request.position)
        of_weights = request.weights is not None and name != request.position  # the file that a trained model needs
        request = replace(request, position=None if of_weights else name)
    if request.page is not None:
        from relpos.cli.explorer_page import write_page

        write_page(request, lambda path: free_file(path, (PAGE_ENDING[1:],), option="--page"))
        return
    if (request.position is None) == (request.weights is None):
        requested = "neither" if request.position is None else f"{request.position!r} and --weights"
        fail(
            "a position or --weights FILE", requested, "Write relpos show relative_2d, or relpos show --weights FOLDER."
        )
    if request.weights is not None and _wants_page(request):
        _page(request)
        return
    out = None if request.out is None else free_file(Path(request.out))
    if request.weights is None:
        name, title, note, view, strips = _untrained(request)
    else:
        name, title, note, view, strips = _trained(request)
    out = free_file(_numbered(Path(f"show-{name}.png"))) if out is None else out
    save_picture(picture(title, note, strips), out)
    what = f"{name}, {_tokens_in_words(view.tokens)}" + ("" if view.query is None else f", {view.chosen_name}")
    say(Console(), f"Drew {what}: {out}")


def _untrained(request: ShowRequest) -> tuple[str, str, str, View, list[Strip]]:
    """Name, title, note, view and strips of a mechanism by name."""
    import torch

    from relpos.core.checks import require_int
    from relpos.position import Site, find
    from relpos.report.drawing.mechanism_data import HEADS_AT_MOST, View, strips
    from relpos.report.drawing.trained_examples import SITES, TRAINED_ON, start, trained

    assert request.position is not None
    preset = find(request.position, 2 if request.grid is not None else 1 if request.length is not None else None)
    tokens = _tokens(preset, request.length, request.grid)
    heads, head_dim, seed = (
        default if value is None else value
        for value, default in zip((request.heads, request.head_dim, request.seed), (HEADS, HEAD_DIM, SEED), strict=True)
    )
    require_int(heads, "--heads", at_least=1)
    require_int(head_dim, "--head-dim", at_least=1)
    require_int(seed, "--seed", at_least=0)
    view = View(tokens, heads, head_dim, heads * head_dim, request.query)
    _require_query(view)
    torch.manual_seed(seed)
    site = Site(num_heads=heads, head_dim=head_dim, embed_dim=heads * head_dim, queries=tokens)
    try:
        mechanism = preset.make(site)
    except ValueError as error:
        where = f"Here a head is {head_dim} wide (--head-dim) and a token {site.embed_dim}: {heads} heads (--heads)."
        raise ValueError(f"{error} {where}") from error
    note = f"{_tokens_in_words(tokens).capitalize()}, {heads} head{'s' if heads > 1 else ''} of width {head_dim}. "
    example = trained(preset.name, site) if request.seed is None else None
    if example is not None:
        axes = tokens.axes
        std, task = SITES[axes].init_std, TRAINED_ON[axes]
        drawn = strips(example.parts(), view, where=" after training")
        if len(example.parts()) > 1:  # with initial values, too, a sum's picture is too tall
            note += f"An example trained on {task}. "
        else:
            note += f"Above: initial values (random, std {std}). Below: an example trained on {task}. "
            drawn = strips(start(preset.name, axes).parts(), view, where=" before training") + drawn
        note += "" if axes == 2 else "Later keys were masked in training: their values mean nothing. "
        return preset.name, preset.title, f"{note}{_READING}", view, drawn
    if any(True for _ in mechanism.parameters()):
        note += f"Before training: what starts at random (std {site.init_std}, seed {seed}) means nothing yet."
    else:
        note += "It has no learned parameters."
    if heads > HEADS_AT_MOST:
        note += f" The first {HEADS_AT_MOST} heads are drawn."
    return preset.name, preset.title, f"{note} {_READING}", view, strips(mechanism.parts(), view)


_READING = (
    "Offset is query minus key: at +1 the key is one position before the query. "
    "Numbers, + and \N{MINUS SIGN}, or hatching of negative values show the sign; values within 2% of the scale have "
    "none."
)


def _trained(request: ShowRequest) -> tuple[str, str, str, View, list[Strip]]:
    """The same for a trained model: its mechanisms on its training tokens."""
    from relpos.core.checks import fail
    from relpos.report.drawing.mechanism_data import strips
    from relpos.train import load

    for option in ("length", "grid", "heads", "head_dim", "seed"):
        if getattr(request, option) is not None:
            name = flag_of(type(request), option)
            fail("--weights alone", f"--weights and {name}", f"A trained model has its own; leave {name} out.")
    assert request.weights is not None
    folder = _model_folder(Path(request.weights))
    loaded: tuple[Any, dict[str, Any]] = load(folder)
    model, config = loaded
    if (count := model.coordinates.count) > TRAINED_AT_MOST:
        fail(f"at most {TRAINED_AT_MOST:,} tokens in a picture", f"{count:,} in {folder}", "Draw one with fewer.")
    view, drawn = strips_of(model.to("cpu"), request.query)
    drawn = drawn or strips([], view)
    steps = config.get("recipe", {}).get("steps")
    learned = bool(model.position_parameters())
    note = f"{_tokens_in_words(view.tokens).capitalize()}, {view.num_heads} heads. "
    note += f"Trained for {steps} steps on {config.get('task')}, seed {config.get('seed')}. " if steps else ""
    note += "" if learned else "Its position has no learned parameters. "
    title = f"What {config.get('position')} learned" if learned else f"{config.get('position')} in a trained model"
    return folder.resolve().name, title, f"{note}{_READING}", view, drawn


def strips_of(model: Any, query: int | None = None) -> tuple[View, list[Strip]]:
    """The view of a trained model's tokens, and the strips of its mechanisms, none without mechanisms."""
    from relpos.report.drawing.mechanism_data import View, strips

    attention = model.blocks[0].attn
    width = attention.qkv.in_features
    view = View(model.coordinates, attention.num_heads, width // attention.num_heads, width, query)
    _require_query(view)
    drawn = strips(model.token_position.parts(), view) if model.token_position.parts() else []
    layers = model.attention_position
    for layer, position in enumerate(layers):
        where = " in all layers" if len(layers) == 1 else f" in layer {layer}"
        if position.parts():
            drawn += strips(position.parts(), view, where=where)
    return view, drawn


def _wants_page(request: ShowRequest) -> bool:
    """Whether to draw a page from parameter names: it is requested, or relpos did not train the model."""
    from relpos.files.reading import FileError, read_json
    from relpos.files.tensors import ENDING, INDEX
    from relpos.train.checkpoint import CONFIG, WEIGHTS

    assert request.weights is not None
    path = Path(request.weights)
    if Path(request.out or "").suffix.lower() == PAGE_ENDING:
        return True
    if path.is_file() and path.name != WEIGHTS:
        return path.name.endswith((ENDING, INDEX))
    folder = path if path.is_dir() else path.parent
    if not any(folder.glob(f"*{ENDING}")):
        return False
    try:
        config = read_json(folder / CONFIG, CONFIG_AT_MOST) if (folder / CONFIG).exists() else {"model_type": None}
    except FileError:
        return False  # loading the model reports the fault
    foreign = ("model_type", "architecture", "architectures")
    in_windows = isinstance(config, dict) and config.get("class") == "SwinTransformer"
    return in_windows or (isinstance(config, dict) and any(name in config for name in foreign))


def _page(request: ShowRequest) -> None:
    """Write the page of learned positions in given weights."""
    from rich.console import Console

    from relpos import __version__
    from relpos.core.checks import fail
    from relpos.files.reading import FileError, read_json
    from relpos.files.tensors import open_tensors
    from relpos.files.writing import write_whole
    from relpos.report.drawing.stored_positions import KNOWN, stored_positions
    from relpos.report.weights import weights_page
    from relpos.train.checkpoint import CONFIG

    for option in ("length", "grid", "heads", "head_dim", "seed", "query"):
        if getattr(request, option) is not None:
            name = flag_of(type(request), option)
            fail("--weights alone", f"--weights and {name}", f"The page has every head and offset; leave {name} out.")
    assert request.weights is not None
    path = Path(request.weights)
    name = path.resolve().name
    unnamed = _numbered(Path(f"show-{name.partition('.safetensors')[0]}.html"))
    out = free_file(Path(request.out or unnamed), (PAGE_ENDING[1:],))
    tensors = open_tensors(path)
    try:
        config = read_json((path if path.is_dir() else path.parent) / CONFIG, CONFIG_AT_MOST)
    except FileError:  # it is optional
        config = {}
    found, left = stored_positions(tensors, config if isinstance(config, dict) else {})
    if not found:
        remedy = "Absolute positions are not drawn. A mechanism of your own: relpos show FILE.py:NAME --weights DIR."
        came = f"{path}, with none among its {len(tensors.shapes):,} parameters"
        if left:
            came = f"{path}, whose {left[0][0]} cannot be drawn: {left[0][1]}"
        fail(f"weights with a learned position ({', '.join(KNOWN)}, ...)", came, remedy)
    write_whole(out, weights_page(name, found, left, version=__version__))
    say(Console(), f"Drew {len(found)} parameter{'s' if len(found) > 1 else ''} of {name}: {out}")


def _model_folder(path: Path) -> Path:
    """The folder of a model, given the folder or its file of weights."""
    from relpos.core.checks import fail
    from relpos.train.checkpoint import WEIGHTS

    if path.is_dir():
        return path
    remedy = "Train one with relpos train --out DIR."
    if not path.exists():
        fail("a model's folder or its weights for --weights", f"{path}, which does not exist", remedy)
    if path.name != WEIGHTS:
        fail(f"a model's folder or its {WEIGHTS} for --weights", f"the file {path}", remedy)
    return path.parent


def _tokens(preset: Preset, length: int | None, grid: str | None) -> Sequence | Grid:
    """The requested tokens, or those that suit the mechanism."""
    from relpos.core import Grid, Sequence
    from relpos.core.checks import fail, require_int

    on_sequences, on_grids = 1 in preset.token_axes, 2 in preset.token_axes
    if length is not None and grid is not None:
        fail("one of --length and --grid", f"--length {length} and --grid {grid}", "Leave one out.")
    if not on_sequences and not on_grids:
        fail("a sum of positions for the same tokens", repr(preset.name), "Add positions for sequences, or for grids.")
    if length is not None:
        if not on_sequences:
            fail(f"--grid for {preset.name}, which needs rows and columns", f"--length {length}", "Write --grid 8x8.")
        require_int(length, "--length", at_least=1)
    if grid is not None and not on_grids:
        fail(f"--length for {preset.name}, which has one axis", f"--grid {grid}", f"Write --length {LENGTH}.")
    if grid is None and (length is not None or on_sequences):
        tokens: Sequence | Grid = Sequence(LENGTH if length is None else length)
    else:
        tokens = Grid(*(GRID if grid is None else _sizes(grid)))
    if tokens.count > TOKENS_AT_MOST:
        fail(
            f"at most {TOKENS_AT_MOST} tokens in a picture",
            str(tokens.count),
            "Draw fewer: they show the same pattern.",
        )
    return tokens


def _sizes(grid: str) -> tuple[int, int]:
    from relpos.core.checks import fail

    match = re.fullmatch(r"(\d{1,6})\s*[xX×]\s*(\d{1,6})", grid.strip())  # noqa: RUF001
    if match is None or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
        fail("--grid as rows x columns of at least 1", repr(grid), "Write for example --grid 8x8.")
    return int(match[1]), int(match[2])


def _require_query(view: View) -> None:
    from relpos.core.checks import fail

    if view.query is not None and not 0 <= view.query < view.count:
        fail(
            f"--query from 0 to {view.count - 1}", str(view.query), "Tokens are numbered from 0, on a grid row by row."
        )


def _numbered(path: Path) -> Path:
    """The path, or if it exists the first free one of show-NAME-2.png, show-NAME-3.png, ..."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def _tokens_in_words(tokens: Sequence | Grid) -> str:
    from relpos.core import Grid

    if isinstance(tokens, Grid):
        rows, columns = tokens.sizes
        return f"a grid of {rows} x {columns}"
    return f"a sequence of {tokens.count} token{'s' if tokens.count > 1 else ''}"
