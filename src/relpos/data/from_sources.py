"""Images of Hugging Face's datasets and of WebDataset's shards as a task: `from_hf`, `from_wds`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.core.checks import fail, require_choice, require_flag, require_int, shape_of
from relpos.data.documents import SOURCES, Documents
from relpos.data.sampled_images import PictureOptions, SampledImages
from relpos.data.sources.cache import SIZE, DiskCache, bytes_of
from relpos.data.sources.source import SampleSource
from relpos.data.streams import BUFFER, SURVEY, StreamedImages
from relpos.data.task import Task, Watch
from relpos.data.text import Text

if TYPE_CHECKING:
    from relpos.data.sources.texts import FoundDocuments


def from_named(named: str, *, watch: Watch | None = None, **options: Any) -> Task:
    """The task of `hf:NAME`, `hf:FOLDER` or `wds:SHARDS`, as `--data` takes them, with the options of each.

    Raises:
        ValueError: see `from_hf` and `from_wds`; or an option that the other has.
    """
    kind, _, rest = named.partition(":")
    if not rest:
        fail("hf:NAME, hf:FOLDER or wds:SHARDS as data", repr(named), "Write what stands behind the colon.")
    other = {"cache", "cache_size"} if kind == "hf" else {"text_column", "tokenizer", "documents"}
    odd = sorted(options.keys() & other)
    if odd:
        fail(f"{odd[0]} with data of {'wds' if kind == 'hf' else 'hf'}:", named, f"Leave {odd[0]} out.")
    return (from_hf if kind == "hf" else from_wds)(rest, watch=watch, **options)


def from_hf(
    data: Any,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    text_column: str | None = None,
    tokenizer: object = None,
    documents: str | None = None,
    streaming: bool = False,
    image_size: int | Sequence[int] | None = None,
    patch: int | Sequence[int] | None = None,
    rotate: bool = False,
    max_pixels: int | None = None,
    bad_data: str = "skip",
    buffer: int | None = None,
    survey: int | None = None,
    watch: Watch | None = None,
) -> Task:
    """The task of a dataset of Hugging Face, for `relpos.compare`.

        relpos.compare(build, relpos.data.from_hf("photos-on-disk/"))

    Args:
        data: `NAME[@CONFIG][:SPLIT]` on the hub, `FOLDER[:SPLIT]` written by `save_to_disk`, or a `Dataset`,
            `IterableDataset` or dict of them. Splits named train, validation (val, valid) and test are used; one alone
            is split. No code of a dataset is run.
        image_column, label_column: names of columns of images and their classes; found if there is one candidate.
        text_column: the column of documents, for a task on text instead; found if no column has images. tokenizer,
            documents: see `relpos.data.Text`.
        streaming: read samples while training, in a shuffled order, instead of keeping all in memory. Of documents the
            first 256 MiB are read.
        image_size, patch, rotate, max_pixels: see `relpos.data.ImageFolder`; sizes are one number or (rows, columns).
        bad_data: "skip" leaves out and counts samples that cannot be used, "fail" names the first.
        buffer: of a stream, how many pictures are shuffled together. survey: how many training samples are read before.
        watch: receives how many samples are read, of how many.

    Raises:
        ValueError: one line: no such dataset, access, split or column; samples that cannot be used.
    """
    from relpos.data.decode import bytes_at_most
    from relpos.data.sources.hugging_face import HuggingFace, is_text, opened

    require_flag(streaming, "streaming")
    require_choice(bad_data, "bad_data", ("skip", "fail"))
    of_images = {
        "image_column": image_column, "label_column": label_column, "image_size": image_size, "patch": patch,
        "rotate": rotate or None, "max_pixels": max_pixels, "buffer": buffer, "survey": survey,
    }  # fmt: skip
    of_text = {"text_column": text_column, "tokenizer": tokenizer, "documents": documents}
    named = [name for name, value in of_images.items() if value is not None]
    splits = opened(data, streaming)
    if image_column is None and (text_column is not None or is_text(splits)):
        if named:
            fail("images with " + " and ".join(named), "documents", "Leave them out, or name a column of images.")
        from relpos.data.sources.texts import documents_of

        found = documents_of(data, text_column, splits, streaming=streaming, bad_data=bad_data)
        return _text(found, tokenizer, documents)
    odd = [name for name, value in of_text.items() if value is not None]
    if odd:
        fail("documents with " + " and ".join(odd), "images", "Leave them out, or name a column of text alone.")
    how = PictureOptions.of(image_size, patch, rotate, max_pixels, bad_data, watch)
    source = HuggingFace(
        data, image_column, label_column, splits, streaming=streaming, image_at_most=bytes_at_most(how.max_pixels)
    )
    return _task(source, how, streaming, buffer, survey)


def from_wds(
    shards: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    streaming: bool = False,
    cache: str | Path | None = None,
    cache_size: str | int | None = None,
    image_size: int | Sequence[int] | None = None,
    patch: int | Sequence[int] | None = None,
    rotate: bool = False,
    max_pixels: int | None = None,
    bad_data: str = "skip",
    buffer: int | None = None,
    survey: int | None = None,
    watch: Watch | None = None,
) -> Task:
    """The task of WebDataset's shards, for `relpos.compare`.

        relpos.compare(build, relpos.data.from_wds("data/{train,val,test}-{0000..0099}.tar", streaming=True))

    Args:
        shards: a pattern with braces, of paths or of addresses by http. `pipe:` is refused. If all names have train,
            val or test in them, they are the splits.
        image_column: the field of images, or several joined by ";". label_column: the field of the class's name or
            number, or `json.KEY`. Found if there is one candidate. Fields that are pickles are refused.
        cache: a folder that keeps shards of a server, shared by all processes. cache_size: its limit, such as "20GB".
        streaming, image_size, patch, rotate, max_pixels, bad_data, buffer, survey, watch: see `from_hf`.

    Raises:
        ValueError: one line: no such shards or fields, a server that fails, samples that cannot be used.
    """
    from relpos.data.decode import bytes_at_most
    from relpos.data.sources.shards import ShardFiles

    require_flag(streaming, "streaming")
    if not isinstance(shards, str | Path):
        fail("shards as text, such as data-{0000..0099}.tar", shape_of(shards), "Pass a path or a pattern.")
    if cache is None and cache_size is not None:
        fail("cache_size with cache", "no cache", "Name its folder, or leave cache_size out.")
    kept = None if cache is None else DiskCache(cache, bytes_of(SIZE if cache_size is None else cache_size))
    how = PictureOptions.of(image_size, patch, rotate, max_pixels, bad_data, watch)
    source = ShardFiles(str(shards), image_column, label_column, kept, image_at_most=bytes_at_most(how.max_pixels))
    return _task(source, how, streaming, buffer, survey)


def _task(source: SampleSource, how: PictureOptions, streaming: bool, buffer: int | None, survey: int | None) -> Task:
    if streaming:
        buffer, survey = BUFFER if buffer is None else buffer, SURVEY if survey is None else survey
        require_int(buffer, "buffer", at_least=1)
        require_int(survey, "survey", at_least=1)
        return StreamedImages(source, how, buffer, survey)
    for name, value in (("buffer", buffer), ("survey", survey)):
        if value is not None:
            fail(f"{name} with streaming", f"{name}={value} alone", "Pass streaming, too, or leave it out.")
    return SampledImages(source, how)


def _text(found: FoundDocuments, tokenizer: object, documents: str | None) -> Task:
    how: dict[str, Any] = {"tokenizer": tokenizer, "documents": documents}
    task = Text(found.documents, **{name: value for name, value in how.items() if value is not None})
    task.leakage = found.leakage
    task.description += "".join(f" {line}" for line in found.leakage)
    return task


def _again(options: dict[str, Any]) -> Documents:
    from relpos.data.sources.texts import again

    return again(options)


SOURCES["hf:"] = _again
