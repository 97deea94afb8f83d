"""`relpos retrofit`: verify a retrofitted model of another library, time it against the published one, and say from how
many tokens relpos should compute on this device."""

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
    from relpos.bench.retrofits import RetrofitPair
    from relpos.core.checks import fail, require_name
    from relpos.train.processes import resolve_device

    if request.train and request.forward:
        fail("one of --train and --forward", "both", "Leave one out.")
    lengths = LENGTHS if request.lengths is None else _lengths(request.lengths)
    device = resolve_device(request.device)
    dtype = ("bfloat16" if device.type == "cuda" else "float32") if request.dtype is None else request.dtype
    require_name(dtype, ["float32", "bfloat16"], "a dtype")
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    console = Console()
    columns = (SpinnerColumn(), Description(), TimeElapsedColumn())
    shown = Console(stderr=True)  # so that only the tables are piped
    found: dict[bool, list[RetrofitTiming]] = {}
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bars:
        bar = bars.add_task(f"load {request.model}")
        model = _model(request.model).to(device)
        try:
            compared = RetrofitPair(
                model,
                border=request.border,
                always=request.border is None,
                progress=lambda step: bars.update(bar, description=step),
            )
        except RuntimeError as error:
            if "The model is restored" in str(error):
                raise ValueError(str(error)) from error
            raise
        for train in (True, False):
            if not (request.forward if train else request.train):
                found[train] = compared.timings(
                    lengths, train=train, rounds=request.rounds, batch=request.batch_size, half=dtype == "bfloat16"
                )
    console.print(Text(str(compared.report)), soft_wrap=True)
    if (note := note_on_torchvision()) is not None:
        console.print(Text(note), soft_wrap=True)
    for train, timings in found.items():
        console.print()
        console.print(_table(timings, forward=not train))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
    where = f"On {name}, {dtype}, batch {request.batch_size}"
    said = _border_in_words(found) if request.border is None else _speed_in_words(next(iter(found.values())))
    console.print(f"{where}, {said} {_MEMORY}", highlight=False, soft_wrap=True)


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


_MEMORY = "MiB is the peak memory of a step above the level before it."


def _border_in_words(found: dict[bool, list[RetrofitTiming]]) -> str:
    """A sentence: from how many tokens on relpos is not slower, and what to pass."""
    from relpos.bench.retrofits import border_by

    borders = {train: border_by(timings) for train, timings in found.items()}
    parts = []
    for train, border in borders.items():
        what = "training" if train else "inferring"
        parts.append(f"{what}, {'never' if border is None else f'from {border:,} tokens on'}")
    timed = [border for border in borders.values() if border is not None]
    if len(timed) < len(borders):
        remedy = "Leave the model as published for such inputs, or pass border=0 to save memory."
    else:
        remedy = f"Pass relpos.retrofit(model, border={max(timed)})."
    return f"relpos is at least as fast: {'; '.join(parts)}, of what was timed. {remedy}"


def _speed_in_words(timings: list[RetrofitTiming]) -> str:
    """A sentence: from which length on the retrofit is at least as fast, with the border that was asked for."""
    fast: list[RetrofitTiming] = []
    for one in reversed(timings):
        if one.ratio < 1.0:
            break
        fast.append(one)
    if not fast:
        return "the retrofit is slower at the largest size."
    first = fast[-1].length
    return f"the retrofit is at least as fast {'at this size' if first is None else f'from {first:,} on'}."
