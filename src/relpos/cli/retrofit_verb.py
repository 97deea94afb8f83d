"""`relpos retrofit`: verify a retrofitted model of transformers or timm, and time it against the published one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.progress import Description

if TYPE_CHECKING:
    from rich.table import Table

    from relpos.bench.retrofits import RetrofitTiming
    from relpos_command.requests import RetrofitRequest

LIBRARIES = ("relpos.bench.retrofits",)
LENGTHS = (512, 1024, 2048)
_LONGEST = 2**20


def run(request: RetrofitRequest) -> None:
    """Run the verb."""
    import torch
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    from relpos.adapters.common.libraries import note_on_torchvision
    from relpos.bench.retrofits import compare_retrofit
    from relpos.core.checks import fail

    if request.train and request.forward:
        fail("one of --train and --forward", "both", "Leave one out.")
    lengths = LENGTHS if request.lengths is None else _lengths(request.lengths)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    console = Console()
    columns = (SpinnerColumn(), Description(), TimeElapsedColumn())
    shown = Console(stderr=True)  # so that only the table is piped
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bars:
        bar = bars.add_task(f"load {request.model}")
        model = _model(request.model).to(request.device)
        try:
            report, timings = compare_retrofit(
                model,
                lengths,
                train=not request.forward,
                rounds=request.rounds,
                batch=request.batch_size,
                border=request.border,
                progress=lambda step: bars.update(bar, description=step),
            )
        except RuntimeError as error:
            if "The model is restored" in str(error):
                raise ValueError(str(error)) from error
            raise
    console.print(Text(str(report)), soft_wrap=True)
    if (note := note_on_torchvision()) is not None:
        console.print(Text(note), soft_wrap=True)
    console.print()
    console.print(_table(timings, forward=request.forward))
    console.print(_speed_in_words(timings), highlight=False, soft_wrap=True)


def _lengths(text: str) -> tuple[int, ...]:
    """Lengths joined by commas, shortest first."""
    from relpos.core.checks import fail

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) < 9 and 2 <= int(part) <= _LONGEST for part in parts):
        fail(f"--lengths from 2 to {_LONGEST:,}, joined by commas", repr(text), "Write --lengths 512,2048.")
    return tuple(sorted({int(part) for part in parts}))


def _model(name: str) -> Any:
    """The model of `hf:FOLDER`, or of `timm:NAME` or `torchvision:NAME` with random weights."""
    from relpos.adapters.common.libraries import imported
    from relpos.adapters.library_models import require_folder, require_timm_name
    from relpos.adapters.torchvision_models import require_torchvision_name, torchvision_model
    from relpos.core.checks import fail

    source, _, rest = name.partition(":")
    if source == "timm" and rest:
        require_timm_name(rest)
        return imported("timm").create_model(rest, pretrained=False)
    if source == "torchvision" and rest:
        require_torchvision_name(rest)
        return torchvision_model(rest)
    if source == "hf" and rest:
        require_folder(rest)
        transformers = imported("transformers")
        folder = Path(rest)
        if any(folder.glob("*.safetensors")):
            return transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        return transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    fail("hf:FOLDER, timm:NAME or torchvision:NAME", repr(name), "Write relpos retrofit timm:beit_base_patch16_224.")


def _table(timings: list[RetrofitTiming], *, forward: bool) -> Table:
    """One row per length."""
    from rich import box
    from rich.table import Table

    what = "forward pass without gradients" if forward else "training step"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=what.capitalize(), title_justify="left")
    for heading in ("length", "published ms", "retrofit ms", "speedup", "published MiB", "retrofit MiB"):
        table.add_column(heading, justify="right")
    for one in timings:
        table.add_row(
            "image" if one.length is None else f"{one.length:,}",
            f"{one.published_ms:,.1f}",
            f"{one.retrofit_ms:,.1f}",
            f"{one.ratio:.2f}",
            f"{one.published_mib:,.0f}",
            f"{one.retrofit_mib:,.0f}",
        )
    return table


def _speed_in_words(timings: list[RetrofitTiming]) -> str:
    """A sentence: from which length on the retrofit is at least as fast."""
    fast: list[RetrofitTiming] = []
    for one in reversed(timings):
        if one.ratio < 1.0:
            break
        fast.append(one)
    memory = "MiB is the peak memory of a step above the level before it."
    if not fast:
        return f"On this machine the retrofit is slower at the largest size. {memory}"
    first = fast[-1].length
    where = "at this size" if first is None else f"from {first:,} on"
    return f"On this machine the retrofit is at least as fast {where}. {memory}"
