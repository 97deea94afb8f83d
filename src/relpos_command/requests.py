"""The options of each verb: one dataclass per verb, whose fields are its options.

A field is an option of the command line. A field of `CompareRequest` is also an argument of `relpos.compare` and a word
of the command that repeats a comparison. Nothing here imports relpos, so that help and wrong options are quick: names
of relpos are repeated here, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relpos_command.option import (
    each,
    number,
    option,
    read_names,
    read_recipe,
    read_width,
    write_names,
    write_recipe,
)
from relpos_command.option_groups import ClusterOptions, DataOptions, MachineOptions, ProcessOptions

if TYPE_CHECKING:
    from relpos.train import Build, Evaluate, TrainingStep

KINDS = ("positions", "data", "backends")
WHATS = ("position", "attention", "norm", "optimizer")
OPTIMIZERS = ("adamw", "lion", "sophia-g", "sophia-h")
PLOTS = ("cost", "far-cost", "shift", "canvas", "rotation", "length", "place", "training")

_SEED_AT_MOST = 2**63 - 1
_BATCH = (1, 1_000_000)
_COUNT = (1, 4096)
_STEPS = (1, 10_000_000)
_THREADS = (1, 1024)
_ROUNDS = (1, 1000)
_FUNCTION = "your function as FILE.py:NAME"


@dataclass(frozen=True, kw_only=True)
class CompareRequest(DataOptions, MachineOptions):
    """What `relpos compare` and `relpos.compare` are asked to compare."""

    positions: tuple[str, ...] | None = option(
        None,
        "mechanisms, joined by commas; a+b is a sum, a~b alternates over layers (relpos list positions); "
        "FILE.py:NAME is your own. standard: about a dozen well-known ones; all: every one that suits the data",
        "NAMES",
        default_in_words="six, one of each well-known kind",
        read=read_names,
        write=write_names,
    )
    what: str = option("position", f"what is compared: {', '.join(WHATS)}", "WHAT", choices=WHATS)
    choices: tuple[str, ...] | None = option(
        None,
        "with --what: the ones to compare, joined by commas",
        "NAMES",
        default_in_words="all",
        read=read_names,
        write=write_names,
    )
    seeds: int = option(1, "training runs of each", "N", bounds=(1, 1000), stated=True)
    steps: int | None = option(None, "training steps", "N", bounds=_STEPS, default_in_words="the recipe's")
    batch_size: int | None = option(
        None, "inputs per training step", "N", bounds=_BATCH, default_in_words="the recipe's"
    )
    lr: float | None = option(None, "the highest learning rate", "RATE", type=number, default_in_words="the recipe's")
    recipe: Mapping[str, Any] | None = option(
        None,
        "change a field of the recipe, such as recipe.weight_decay=0.1; may be repeated",
        "KEY=VALUE",
        flag="--set",
        type=each,
        repeated=True,
        read=read_recipe,
        write=write_recipe,
    )
    model: str | Build | None = option(
        None,
        "swin, for images: relpos's Swin Transformer, first with its own position (own); timm:NAME; "
        f"torchvision:NAME; hf:FOLDER (transformers); or {_FUNCTION}: build(position, task), which returns the model",
        "MODEL",
        default_in_words="relpos's vision Transformer; for text its language model",
    )
    step: str | TrainingStep | None = option(None, f"{_FUNCTION}: step(model, batch), which returns the loss", "STEP")
    evaluate: str | Evaluate | None = option(
        None, f"{_FUNCTION}: evaluate(model, split), which returns a figure", "EVALUATE"
    )
    better: Literal["higher", "lower"] | None = option(
        None, "with --evaluate: whether higher or lower figures are better", "HOW", choices=("higher", "lower")
    )
    devices_per_trial: int | None = option(
        None,
        "processes that train each model together, one per GPU, as relpos train --devices N",
        "N",
        bounds=_COUNT,
        default_in_words="1",
    )
    out: Any = option(None, "folder for results", "DIR", default_in_words="one under runs/")
    quick: bool = option(False, "check that it works, in under a minute; ranks nothing")


@dataclass(frozen=True, kw_only=True)
class CompareCommand(CompareRequest, ClusterOptions):
    """`relpos compare`, which may use other machines; in Python that is an executor."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """`relpos report`."""

    run: str = option(
        help="the folder of a comparison, or its results.json; alone, its table is printed", metavar="RUN",
        positional=True,
    )  # fmt: skip
    figure: str | None = option(None, "write one figure: a file that ends in pdf, svg or png", "FILE")
    plot: str | None = option(
        None,
        "what the figure shows: cost, accuracy or bits against the time of a step; far-cost, the same at the largest "
        "shift or the longest text; shift, canvas, rotation, how images fare; length, place, how text fares, by length "
        "or by position; training, validation over steps",
        "NAME",
        choices=PLOTS,
        default_in_words="cost",
    )
    width: float | None = option(
        None,
        "of the figure: 3.25in, 8.3cm, 83mm or 240pt; text has 8 points at any width",
        "WIDTH",
        default_in_words="3.25in",
        read=read_width,
    )
    latex: bool = option(False, "print the table for LaTeX (booktabs)")
    csv: bool = option(False, "print every number, one a line")
    overwrite: bool = option(False, "replace the file if it exists")


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """`relpos bundle`."""

    run: str = option(help="the folder of a comparison, or its results.json", metavar="RUN", positional=True)
    out: str = option(help="the file to write, which ends in zip", metavar="OUT", positional=True)
    with_samples: bool = option(False, "include samples of the data: images with attention, generated text")
    overwrite: bool = option(False, "replace the file if it exists")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(DataOptions, MachineOptions, ProcessOptions):
    """`relpos train`."""

    position: str = option(
        help="a mechanism, a sum a+b, or a~b over layers (relpos list positions), or FILE.py:NAME", metavar="NAME"
    )
    out: str = option(help="folder for model.safetensors and config.json", metavar="DIR")
    seed: int = option(0, "seed of the initial weights and of the batches", "N", bounds=(0, _SEED_AT_MOST))
    steps: int | None = option(None, "training steps", "N", bounds=_STEPS, default_in_words="the recipe's")
    optimizer: str = option(
        "adamw", f"{', '.join(OPTIMIZERS)}, with the learning rate chosen for it", "NAME", choices=OPTIMIZERS
    )
    threads: int = option(1, "CPU threads; figures repeat only with the same number", "N", bounds=_THREADS)
    batch_size: int | None = option(
        None, "inputs per training step", "N", bounds=_BATCH, default_in_words="the recipe's"
    )


@dataclass(frozen=True, kw_only=True)
class ShowRequest:
    """`relpos show`. The defaults of a picture are in `relpos.cli.show_verb`; None means that nothing was requested."""

    position: str | None = option(
        None, "a mechanism, or a sum a+b (relpos list positions), or FILE.py:NAME", positional=True
    )
    weights: str | None = option(
        None,
        "instead: a folder of relpos train, or safetensors of any model (a file, or a folder with its shards)",
        "PATH",
    )
    length: int | None = option(None, "tokens of a sequence", "N", bounds=(-(10**9), 10**9), default_in_words="16")
    grid: str | None = option(None, "rows x columns of patches, such as 8x8, instead of a sequence", "HxW")
    heads: int | None = option(None, "attention heads", "N", bounds=(-256, 256), default_in_words="4")
    head_dim: int | None = option(None, "width of a head", "N", bounds=(-1024, 1024), default_in_words="16")
    query: int | None = option(None, "draw one query and every key", "I", bounds=(-(10**9), 10**9))
    seed: int | None = option(
        None,
        "seed of random initial tables",
        "N",
        bounds=(-_SEED_AT_MOST, _SEED_AT_MOST),
        default_in_words="0",
    )
    out: str | None = option(
        None,
        "file to write: png, svg or pdf; html for other models' weights",
        "FILE",
        default_in_words="show-NAME.png or .html",
    )
    page: str | None = option(None, "write the explorer instead: an html page with a choice of positions", "FILE")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """`relpos bench`."""

    cases: str = option("target", "cases or families, joined by commas (relpos bench --list)", "NAMES")
    engines: tuple[str, ...] | None = option(
        None,
        "engines, joined by commas (relpos list backends)",
        "NAMES",
        default_in_words="auto; for many windows all",
        read=read_names,
    )
    repeats: int = option(
        7,
        "timed rounds; at most 3 from 8,192 tokens on, three times as many up to 512",
        "N",
        bounds=_ROUNDS,
    )
    threads: int | None = option(None, "CPU threads", "N", bounds=_THREADS, default_in_words="PyTorch's default")
    out: str | None = option(None, "folder for results", "DIR", default_in_words="one under runs/")
    quick: bool = option(
        False,
        "at most 256 tokens and one round; unless --cases names some, three cases without memory, in under a minute",
    )
    memory: bool = option(True, "do not measure memory", flag="--no-memory")
    list: bool = option(False, "only list families and cases")


@dataclass(frozen=True, kw_only=True)
class RetrofitRequest:
    """`relpos retrofit`."""

    model: str = option(
        help="hf:FOLDER (its weights, or random ones of its config.json), timm:NAME or torchvision:NAME",
        positional=True,
    )
    lengths: str | None = option(
        None,
        "lengths to time (tokens, frames or samples), joined by commas; images have the model's size",
        "NUMBERS",
        default_in_words="512,1024,2048",
    )
    train: bool = option(False, "time a training step only")
    forward: bool = option(False, "time a forward pass without gradients only")
    rounds: int = option(5, "timed rounds", "N", bounds=_ROUNDS)
    batch_size: int = option(1, "texts, images or recordings in a batch", "N", bounds=(1, 65_536))
    border: int | None = option(
        None,
        "time a copy in which relpos computes from so many tokens on",
        "N",
        bounds=(0, 10**9),
        default_in_words="0, to find the border",
    )
    threads: int | None = option(None, "CPU threads", "N", bounds=_THREADS, default_in_words="PyTorch's default")
    device: str = option("auto", "auto, cpu, cuda or cuda:0")
    dtype: str | None = option(
        None, "float32, or bfloat16 by autocast", "NAME", default_in_words="bfloat16 on a GPU, float32 elsewhere"
    )


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """`relpos check`."""

    engines: str | None = option(
        None, "engines, joined by commas (relpos list backends)", "NAMES", default_in_words="all"
    )
    all: bool = option(False, "print a line for every kind of call")


@dataclass(frozen=True, kw_only=True)
class ListRequest:
    """`relpos list`."""

    kind: str = option(help=f"what to list: {', '.join(KINDS)}", metavar="KIND", choices=KINDS, positional=True)
    long: bool = option(False, "add a description and the source of each")


@dataclass(frozen=True, kw_only=True)
class VectorsRequest:
    """`relpos vectors`."""

    out: str = option(help="file to write, such as vectors.json; it must not exist", metavar="OUT", positional=True)


@dataclass(frozen=True)
class Verb:
    """A verb: its summary in the help, and its options."""

    summary: str
    request: type


VERBS = {
    "compare": Verb("train the same model with each position mechanism and compare the results", CompareCommand),
    "report": Verb("a finished comparison again: its table, a figure for a paper, LaTeX, CSV", ReportRequest),
    "bundle": Verb("a finished comparison as one file to share, without data or names of people", BundleRequest),
    "train": Verb("train one model and save its weights", TrainRequest),
    "show": Verb("draw a position mechanism, or what a trained model's position learned", ShowRequest),
    "bench": Verb(
        "time the attention engines, PyTorch's attention and other libraries', and measure memory", BenchRequest
    ),
    "retrofit": Verb(
        "verify that a model of transformers or timm computes the same with relpos, and time both", RetrofitRequest
    ),
    "check": Verb(
        "compare every attention engine of this machine with the reference; a table for an issue", CheckRequest
    ),
    "list": Verb("list positions, data or backends", ListRequest),
    "vectors": Verb("write exact cases of positions, to test another implementation with", VectorsRequest),
}
