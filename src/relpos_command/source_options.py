"""Options of data that are read by a library: datasets of Hugging Face, WebDataset's shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from relpos_command.option import option

_SAMPLES = (1, 10**9)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The columns of samples, and how they are read."""

    image_column: str | None = option(
        None,
        "of hf: and wds: data, the column or field of images; wds takes several joined by ;",
        "NAME",
        default_in_words="the only one",
    )
    label_column: str | None = option(
        None, "the one of classes; wds also takes json.KEY", "NAME", default_in_words="the only one"
    )
    text_column: str | None = option(None, "of hf: data, the one of texts", "NAME", default_in_words="the only one")
    streaming: bool = option(False, "read hf: and wds: data while training, instead of keeping all in memory")
    buffer: int | None = option(
        None, "of a stream, images that are shuffled together", "N", bounds=_SAMPLES, default_in_words="2048"
    )
    survey: int | None = option(
        None, "of a stream, images that are read before training", "N", bounds=_SAMPLES, default_in_words="20000"
    )
    bad_data: Literal["skip", "fail"] | None = option(
        None,
        "samples of hf: and wds: data that cannot be used: skip and count them, or fail",
        "HOW",
        choices=("skip", "fail"),
        default_in_words="skip",
    )
    cache: Any = option(None, "a folder that keeps shards of wds:http..., shared by all processes", "DIR")
    cache_size: str | None = option(None, "the most that it holds", "SIZE", default_in_words="20GB")

    def of_source(self) -> dict[str, Any]:
        """How samples are read."""
        return {
            "image_column": self.image_column,
            "label_column": self.label_column,
            "text_column": self.text_column,
            "streaming": self.streaming,
            "buffer": self.buffer,
            "survey": self.survey,
            "bad_data": self.bad_data,
            "cache": self.cache,
            "cache_size": self.cache_size,
        }
