"""The options of each verb. Nothing here imports relpos: its names are repeated here, and a test compares both."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

KINDS = ("positions", "data", "backends")
WHATS = ("position", "attention", "norm", "optimizer")
OPTIMIZERS = ("adamw", "lion", "sophia-g", "sophia-h")
STRATEGIES = ("ddp", "fsdp")
PRECISIONS = ("float32", "bf16-mixed", "fp16-mixed")
_DIGITS_SHOWN = 40
_SEED_AT_MOST = 2**63 - 1


@dataclass(frozen=True)
class Verb:
    """A verb: its summary in the help, and a function that adds its options to a parser."""

    summary: str
    add_options: Callable[[ArgumentParser], None]


def whole(*, at_most: int, at_least: int | None = None) -> Callable[[str], int]:
    """A type of integers within bounds; the lower bound defaults to `-at_most`."""
    low = -at_most if at_least is None else at_least

    def read(typed: str | int) -> int:
        text = str(typed)  # defaults are parsed too
        sign, digits = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)
        came = repr(text) if len(text) <= _DIGITS_SHOWN else f"one of {len(digits):,} digits"
        if not (digits.isascii() and digits.isdecimal()):
            came = came if len(text) <= _DIGITS_SHOWN else f"{len(text):,} characters"
            raise ArgumentTypeError(f"expected a whole number; got {came}")
        # Python reads no more than 4,300 digits.
        number = None if len(digits) > _DIGITS_SHOWN else int(sign + digits)
        if number is None or not low <= number <= at_most:
            raise ArgumentTypeError(f"expected a whole number from {low:,} to {at_most:,}; got {came}")
        return number

    return read


def number(typed: str | float) -> float:
    """A type of finite numbers of at least 0."""
    try:
        found = float(typed)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ArgumentTypeError(f"expected a number of at least 0; got {str(typed)[:_DIGITS_SHOWN]!r}")
    return found


def words(text: str) -> str:
    """A type of non-blank text."""
    if not text.strip():
        raise ArgumentTypeError(f"expected a value; got {text!r}")
    return text


def each(typed: str | list[str]) -> str | list[str]:
    """A type for a repeated option; jsonargparse checks single words, then the whole list."""
    return [words(one) for one in typed] if isinstance(typed, list) else words(typed)


def _add_data(parser: ArgumentParser) -> None:
    """Add the options for the data."""
    add = parser.add_argument
    add(
        "--data",
        type=words,
        default="digits",
        metavar="DATA",
        help="your own images, DIR/class/..., or DIR/train/class/... with val and test beside train; a file of your "
        "own text, read as bytes; digits; or text, Python's documentation. Default: digits",
    )
    add(
        "--image-size",
        type=words,
        metavar="N",
        help="N or HxW: pixels that a model sees; a picture fills them but for two patches on every side. Default: 64",
    )
    add("--patch", type=words, metavar="N", help="N or HxW: pixels of a patch. Default: 8")
    choices = ("error", "skip")
    add("--bad-images", choices=choices, metavar="HOW", help="broken images: error, or skip them. Default: error")
    add(
        "--max-pixels",
        type=whole(at_least=1, at_most=10**12),
        metavar="N",
        help="pixels that an image may have; decoding takes about 12 bytes for each. Default: 100000000",
    )
    add("--rotate", action="store_true", help="also test images rotated by 90, 180 and 270 degrees")


def _add_machine(parser: ArgumentParser) -> None:
    parser.add_argument("--device", type=words, default="auto", help="auto, cpu, cuda or cuda:0. Default: auto")
    what = f"what products are computed in: {', '.join(PRECISIONS)}. Default: float32"
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", metavar="NAME", help=what)


def _add_processes(parser: ArgumentParser) -> None:
    """Add the options for processes and checkpoints."""
    add = parser.add_argument
    add(
        "--devices",
        type=_COUNT,
        metavar="N",
        help="processes on this machine, one a GPU; the same as torchrun --standalone --nproc-per-node N -m relpos "
        "train. Default: 1",
    )
    strategy = (
        "over several processes: ddp, each holds the model; fsdp, each holds a part of every weight. Default: ddp"
    )
    add("--strategy", choices=STRATEGIES, default="ddp", metavar="NAME", help=strategy)
    add("--accumulate", type=_COUNT, default=1, metavar="N", help="parts of a batch computed in turn. Default: 1")
    add("--compile", action="store_true", help="compile the model block by block (torch.compile)")
    every = "steps from one checkpoint in OUT/checkpoints to the next. Default: one a minute"
    add("--checkpoint-every", type=_STEPS, metavar="N", help=every)
    add("--keep", type=whole(at_least=2, at_most=1000), default=2, metavar="N", help="checkpoints kept. Default: 2")
    resume = "go on from a checkpoint: auto for the newest that is whole, or the path of one"
    add("--resume", type=words, metavar="WHICH", help=resume)


_SIZES = whole(at_least=1, at_most=1_000_000)
_COUNT = whole(at_least=1, at_most=4096)
_STEPS = whole(at_least=1, at_most=10_000_000)
_THREADS = whole(at_least=1, at_most=1024)


def _compare(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--positions",
        type=words,
        metavar="NAMES",
        help="mechanisms, joined by commas; a+b is a sum (relpos list positions). standard: about a dozen well-known "
        "ones; all: every one that suits the data. Default: six, one of each well-known kind",
    )
    what = f"what is compared: {', '.join(WHATS)}. Default: position"
    add("--what", choices=WHATS, default="position", metavar="WHAT", help=what)
    add("--choices", type=words, metavar="NAMES", help="with --what: which of them, joined by commas. Default: all")
    add(
        "--seeds",
        type=whole(at_least=1, at_most=1000),
        default=1,
        metavar="N",
        help="training runs of each. Default: 1",
    )
    add("--steps", type=_STEPS, metavar="N", help="training steps. Default: the recipe's")
    add("--batch-size", type=_SIZES, metavar="N", help="inputs of a training step. Default: the recipe's")
    add("--lr", type=number, metavar="RATE", help="the highest learning rate. Default: the recipe's")
    add(
        "--set",
        type=each,
        action="append",
        metavar="KEY=VALUE",
        help="another number of the recipe, such as recipe.weight_decay=0.1; as often as needed",
    )
    own = "a function of your own as FILE.py:NAME"
    model = (
        "swin, for images: relpos's Swin Transformer, its own position first (own); timm:NAME; hf:FOLDER "
        f"(transformers); or {own}: build(position, task), which returns the model. Default: relpos's vision "
        "Transformer, of a text its language model"
    )
    add("--model", type=words, metavar="MODEL", help=model)
    add("--step", type=words, metavar="STEP", help=f"{own}: step(model, batch), which returns the loss")
    add("--evaluate", type=words, metavar="EVALUATE", help=f"{own}: evaluate(model, split), which returns a figure")
    how = ("higher", "lower")
    add(
        "--better", choices=how, metavar="HOW", help="with --evaluate: which of its figures are better, higher or lower"
    )
    add("--out", type=words, metavar="DIR", help="folder for results. Default: one under runs/")
    add("--quick", action="store_true", help="see that it works, in under a minute; ranks nothing")
    _add_data(parser)
    _add_machine(parser)


def _train(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--position",
        type=words,
        required=True,
        metavar="NAME",
        help="a mechanism, or a sum a+b (relpos list positions)",
    )
    add("--out", type=words, required=True, metavar="DIR", help="folder for model.safetensors and config.json")
    add(
        "--seed",
        type=whole(at_least=0, at_most=_SEED_AT_MOST),
        default=0,
        metavar="N",
        help="of initialisation and batches. Default: 0",
    )
    add("--steps", type=_STEPS, metavar="N", help="training steps. Default: the recipe's")
    optimizer = f"{', '.join(OPTIMIZERS)}, at the learning rate chosen for it. Default: adamw"
    add("--optimizer", choices=OPTIMIZERS, default="adamw", metavar="NAME", help=optimizer)
    add(
        "--threads",
        type=_THREADS,
        default=1,
        metavar="N",
        help="CPU threads; figures repeat at an equal number. Default: 1",
    )
    add("--batch-size", type=_SIZES, metavar="N", help="inputs of a training step. Default: the recipe's")
    _add_data(parser)
    _add_machine(parser)
    _add_processes(parser)


def _show(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("position", type=words, nargs="?", help="a mechanism, or a sum a+b (relpos list positions)")
    what = "instead: a folder that relpos train wrote, or safetensors of any model: a file, or a folder with its shards"
    add("--weights", type=words, metavar="PATH", help=what)
    add("--length", type=whole(at_most=10**9), metavar="N", help="tokens of a sequence. Default: 16")
    add("--grid", type=words, metavar="HxW", help="rows x columns of patches, such as 8x8, instead of a sequence")
    add("--heads", type=whole(at_most=256), metavar="N", help="attention heads. Default: 4")
    add("--head-dim", type=whole(at_most=1024), metavar="N", help="width of a head. Default: 16")
    add("--query", type=whole(at_most=10**9), metavar="I", help="draw one query and every key")
    add("--seed", type=whole(at_most=_SEED_AT_MOST), metavar="N", help="of tables that start random. Default: 0")
    add(
        "--out",
        type=words,
        metavar="FILE",
        help="file to write: png, svg or pdf; html for other models' weights. Default: show-NAME.png or .html",
    )
    add("--page", type=words, metavar="FILE", help="write the explorer instead: a page to choose positions on, html")


def _bench(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cases",
        type=words,
        default="target",
        metavar="NAMES",
        help="cases or families, joined by commas (relpos bench --list). Default: target",
    )
    add(
        "--engines",
        type=words,
        metavar="NAMES",
        help="engines, joined by commas (relpos list backends). Default: auto; for many windows all",
    )
    add(
        "--repeats",
        type=whole(at_least=1, at_most=1000),
        default=7,
        metavar="N",
        help="rounds that count, at most 3 from 8,192 tokens and three times as many up to 512. Default: 7",
    )
    add("--threads", type=_THREADS, metavar="N", help="CPU threads. Default: PyTorch's own choice")
    add("--out", type=words, metavar="DIR", help="folder for results. Default: one under runs/")
    add("--quick", action="store_true", help="every case at 256 tokens or fewer, one round")
    add("--no-memory", action="store_true", help="measure no memory")
    add("--list", action="store_true", help="list families and cases, and run none")


def _check(parser: ArgumentParser) -> None:
    engines = "engines, joined by commas (relpos list backends). Default: all"
    parser.add_argument("--engines", type=words, metavar="NAMES", help=engines)
    parser.add_argument("--all", action="store_true", help="a line for every kind of call")


def _list(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"what to list: {', '.join(KINDS)}")
    parser.add_argument("--long", action="store_true", help="with a description and the source of each")


def _retrofit(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=words, help="hf:FOLDER (its weights, or random ones of its config.json) or timm:NAME")
    add(
        "--lengths",
        type=words,
        metavar="NUMBERS",
        help="tokens, frames or samples to time, joined by commas; images have the model's size. "
        "Default: 512,1024,2048",
    )
    add("--train", action="store_true", help="time a training step; the default")
    add("--forward", action="store_true", help="time a forward pass without gradients")
    rounds = whole(at_least=1, at_most=1000)
    add("--rounds", type=rounds, default=5, metavar="N", help="times that each takes its turn. Default: 5")
    sizes = whole(at_least=1, at_most=65_536)
    add("--batch-size", type=sizes, default=1, metavar="N", help="texts, images or recordings in a batch. Default: 1")
    what = "tokens from which relpos computes; 0: always. Default: as measured, see docs/retrofit.md"
    add("--border", type=whole(at_least=0, at_most=10**9), metavar="N", help=what)
    add("--threads", type=_THREADS, metavar="N", help="CPU threads. Default: PyTorch's own choice")
    add("--device", type=words, default="cpu", help="cpu, cuda or cuda:0. Default: cpu")


VERBS = {
    "compare": Verb("train the same model with each position mechanism and show what each is good for", _compare),
    "train": Verb("train one model and save its weights", _train),
    "show": Verb("draw a position mechanism, or what a trained model's position learned", _show),
    "bench": Verb("time the attention engines beside PyTorch's own and other libraries', and measure memory", _bench),
    "retrofit": Verb(
        "verify that a model of transformers or timm computes the same by relpos, and time both", _retrofit
    ),
    "check": Verb("hold every attention engine of this machine against the definition; a table to report", _check),
    "list": Verb("list positions, data or backends", _list),
}
