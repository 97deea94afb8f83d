"""Groups of options: data, a machine, its processes, other machines. A request takes the groups that its verb needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relpos_command.option import each, option, read_names, read_pairs, read_size, write_size
from relpos_command.source_options import SourceOptions

STRATEGIES = ("ddp", "fsdp")
PRECISIONS = ("float32", "bf16-mixed", "fp16-mixed")

_COUNT = (1, 4096)
_STEPS = (1, 10_000_000)


@dataclass(frozen=True, kw_only=True)
class DataOptions(SourceOptions):
    """The data, and how images or a text are read."""

    data: Any = option(
        "digits",
        "your images, DIR/class/..., or DIR/train/class/... with DIR/val and DIR/test; your text file; "
        "digits (handwritten); text (Python's documentation); hf:NAME or hf:FOLDER (datasets); or wds:SHARDS, such as "
        "wds:data-{000..099}.tar (WebDataset)",
        "DATA",
        stated=True,
    )
    image_size: int | Sequence[int] | None = option(
        None,
        "N or HxW: pixels of a model's input; an image fills it up to a margin of two patches at each edge",
        "N",
        default_in_words="64",
        read=read_size,
        write=write_size,
    )
    patch: int | Sequence[int] | None = option(
        None, "N or HxW: pixels of a patch", "N", default_in_words="8", read=read_size, write=write_size
    )
    bad_images: Literal["error", "skip"] | None = option(
        None, "broken images: error, or skip them", "HOW", choices=("error", "skip"), default_in_words="error"
    )
    max_pixels: int | None = option(
        None,
        "most pixels of an image; decoding needs about 12 bytes per pixel",
        "N",
        bounds=(1, 10**12),
        default_in_words="100000000",
    )
    rotate: bool = option(False, "also test images rotated by 90, 180 and 270 degrees")
    tokenizer: Any = option(
        None,
        "of a text: bytes; hf:FOLDER, hf:FILE or hf:NAME (its tokenizer.json, a name from Hugging Face's cache); "
        "tiktoken:NAME or tiktoken:FILE.tiktoken",
        "NAME",
        default_in_words="bytes",
    )
    documents: Literal["cut", "packed"] | None = option(
        None,
        "of a text: cut, inputs are cut from all documents joined; packed, attention stays within a document; in a "
        "file, lines of <|endoftext|> are between them",
        "HOW",
        choices=("cut", "packed"),
        default_in_words="cut",
    )

    def of_images(self) -> dict[str, Any]:
        """How images and samples are read."""
        return {
            **self.of_source(),
            "image_size": self.image_size,
            "patch": self.patch,
            "bad_images": self.bad_images,
            "max_pixels": self.max_pixels,
            "rotate": self.rotate,
        }

    def of_text(self) -> dict[str, Any]:
        """How a text is read."""
        return {"tokenizer": self.tokenizer, "documents": self.documents}


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device and the precision of a run."""

    device: str = option("auto", "auto, cpu, cuda or cuda:0", stated=True)
    precision: str = option(
        "float32",
        f"precision of matrix products: {', '.join(PRECISIONS)}",
        "NAME",
        choices=PRECISIONS,
        stated=True,
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes that train a model, and its checkpoints."""

    devices: int | None = option(
        None,
        "processes on this machine, one per GPU; the same as torchrun --standalone --nproc-per-node N -m relpos train",
        "N",
        bounds=_COUNT,
        default_in_words="1",
    )
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "with several processes: ddp, each has the whole model; fsdp, each has a part of every weight",
        "NAME",
        choices=STRATEGIES,
    )
    accumulate: int = option(1, "parts of a batch, computed one after another", "N", bounds=_COUNT)
    context_parallel: int = option(1, "processes that share each sequence, for long ones", "N", bounds=_COUNT)
    compile: bool = option(False, "compile the model block by block (torch.compile)")
    checkpoint_every: int | None = option(
        None,
        "steps between checkpoints in OUT/checkpoints",
        "N",
        bounds=_STEPS,
        default_in_words="one per minute",
    )
    keep: int = option(2, "how many checkpoints to keep", "N", bounds=(2, 1000))
    resume: str | None = option(
        None, "continue from a checkpoint: auto for the newest complete one, or a path", "WHICH"
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The machines that do the work. No figure depends on them, so no command that repeats a comparison has them."""

    cluster: str | None = option(
        None,
        "do the work on other machines: the address of a Dask scheduler (tcp://HOST:8786), a file that it wrote, or "
        "slurm (docs/scale.md)",
        "WHERE",
        default_in_words="this machine",
    )
    cost_worker: str | None = option(
        None,
        "with --cluster: the machine that measures time and memory (of Dask a worker's name or address, of Slurm a "
        "node)",
        "NAME",
        default_in_words="the first",
    )
    cluster_tls: tuple[str, ...] | None = option(
        None,
        "with a Dask cluster that uses TLS: files of the certificate, its key and the authority, joined by commas",
        "FILES",
        read=read_names,
    )
    slurm: Mapping[str, Any] | None = option(
        None,
        "with --cluster slurm: a parameter of submitit, such as timeout_min=240 or partition=gpu; may be repeated",
        "KEY=VALUE",
        type=each,
        repeated=True,
        read=read_pairs,
    )
    shared: str | None = option(None, "with --cluster slurm: a folder that all nodes see, for jobs and results", "DIR")
    send_data: bool = option(
        False, "with --cluster: send the data to the workers; else each reads them by the same path, and compares them"
    )
    detach: bool = option(
        False,
        "with --cluster: submit all jobs and return (Slurm), or leave a coordinator in the background (Dask); the same "
        "command attaches",
    )
