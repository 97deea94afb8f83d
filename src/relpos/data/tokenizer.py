"""Tokenizers by name, and the bytes of text in each of their tokens.

    bytes             every byte is a token
    hf:NAME           tokenizer.json of a folder, of a file, or of a name in Hugging Face's cache (`tokenizers`)
    tiktoken:NAME     an encoding of `tiktoken`, or FILE.tiktoken: its ranks, split as cl100k_base splits
    an object         of tokenizers, tiktoken or transformers, or with `encode(text) -> ids` and `decode(ids) -> text`

Bits per byte are comparable between tokenizers only if each byte of the text is counted once. So the bytes of a text's
tokens sum to the bytes of the text, and a tokenizer that loses text (by lower-casing, or unknown tokens) is refused.
Nothing here runs code of a tokenizer's folder, and nothing is unpickled.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.core.checks import fail, shape_of
from relpos.files.reading import MIB, FileError, fail_to_read, read_file, require_utf8
from relpos_command.visible import visible

NAMED = "bytes, hf:NAME or tiktoken:NAME"
_FILE_AT_MOST = 256 * MIB
_PIECE = 2**16
"""Most characters that a tokenizer gets at once; longer documents are cut after a line break."""
_SHOWN = 24
_TOKENS_AT_MOST = 2**24
_JSON = "tokenizer.json"


@dataclass(frozen=True)
class Tokens:
    """A text as tokens.

    Attributes:
        ids: the tokens.
        sizes: the bytes of text of each. A character of several tokens counts for one of them.
    """

    ids: NDArray[np.integer[Any]]
    sizes: NDArray[np.integer[Any]]


class Tokenizer(ABC):
    """Text to tokens and back.

    Attributes:
        name: as the user named it, or the class of an object.
        vocabulary: the number of different tokens. identity: a fingerprint of everything that makes its tokens.
    """

    name: str
    vocabulary: int
    identity: str

    @property
    def label(self) -> str:
        """The name without folders, for a page."""
        source, colon, rest = self.name.partition(":")
        path = Path(rest).expanduser()
        if not colon or not path.exists():
            return self.name
        path = path.absolute()
        return f"{source}:{path.parent.name if path.name == _JSON else path.name}"

    @abstractmethod
    def _encode(self, text: str) -> Tokens:
        """The tokens of at most `_PIECE` characters."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; incomplete characters become U+FFFD."""

    def encode(self, text: bytes) -> Tokens:
        """The tokens of a text in UTF-8.

        Raises:
            ValueError: it is not UTF-8, or the tokenizer loses some of it.
        """
        try:
            whole = text.decode("utf-8")
        except UnicodeDecodeError as error:
            came = f"the byte {text[error.start]:#04x} at {error.start:,}"
            fail(f"a text in UTF-8 for the tokenizer {self.name}", came, "Convert the text, or use bytes.")
        pieces = [self._checked(piece) for piece in _pieces(whole)]
        ids, sizes = ([getattr(piece, part) for piece in pieces] for part in ("ids", "sizes"))
        nothing = np.zeros(0, dtype=np.int32)
        return Tokens(np.concatenate([nothing, *ids]), np.concatenate([nothing, *sizes]))

    def _checked(self, text: str) -> Tokens:
        """The tokens of a piece. Only a space at its beginning may be lost: SentencePiece adds one, or takes it."""
        tokens = self._encode(text)
        back, total = self.decode(tokens.ids.tolist()), len(text.encode())
        if back not in (text, text.removeprefix(" ")):
            at = next((i for i, pair in enumerate(zip(text, back, strict=False)) if len({*pair}) > 1), len(back))
            start = max(0, at - _SHOWN // 2)
            was, became = (one[start : start + _SHOWN] for one in (text, back))
            came = f"{self.name}, which makes {became!r} of {was!r}"
            fail("a tokenizer that keeps every character of the text", came, "Choose a byte-level one, or bytes.")
        if back != text and int(tokens.sizes.sum()) == total - 1:
            tokens.sizes[0] += 1
        if int(tokens.sizes.sum()) != total:
            came = f"{int(tokens.sizes.sum()):,} bytes in them of {total:,}"
            fail(f"tokens of {self.name} that cover the text", came, "Choose a byte-level one, or bytes.")
        if total and not 0 <= int(tokens.ids.min()) <= int(tokens.ids.max()) < self.vocabulary:
            came = f"{int(tokens.ids.min()):,} to {int(tokens.ids.max()):,}"
            fail(f"tokens of {self.name} from 0 to {self.vocabulary - 1:,}", came, "Correct its vocabulary.")
        return tokens


class ByteTokenizer(Tokenizer):
    """Every byte is a token. It takes bytes that are not UTF-8, too."""

    name, vocabulary, identity = "bytes", 256, "bytes"

    def encode(self, text: bytes) -> Tokens:
        ids = np.frombuffer(text, dtype=np.uint8)
        return Tokens(ids, np.ones_like(ids))

    def _encode(self, text: str) -> Tokens:
        return self.encode(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of `tokenizers` (Rust), from the JSON that describes it. Special tokens are not added.

    Raises:
        ValueError: it is no tokenizer, or `tokenizers` is not installed.
    """

    def __init__(self, description: str, name: str) -> None:
        self.name, self._description = name, description
        with _in_rust(f"a tokenizer.json of tokenizers; got {name}", "Save it with tokenizer.save_pretrained(FOLDER)."):
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = _vocabulary(max(ids, default=-1) + 1, name)
        self.identity = _digest(description.encode())

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = _imported("tokenizers").Tokenizer.from_str(self._description)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    def _encode(self, text: str) -> Tokens:
        with _in_rust(f"a tokenizer for any text; got {self.name}", "Choose a byte-level one, or bytes."):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        before = np.cumsum([0, *(len(one.encode()) for one in text)])  # bytes before each character
        sizes = np.diff(before[np.maximum.accumulate(ends)], prepend=0)
        return Tokens(np.array(encoding.ids, dtype=np.int32), sizes.astype(np.int32))

    def decode(self, ids: Sequence[int]) -> str:
        with _in_rust(f"tokens of {self.name} as text; got", "Choose another tokenizer, or bytes."):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


class TikToken(Tokenizer):
    """An encoding of `tiktoken`: byte pairs by rank. Special tokens in a text are read as ordinary text."""

    def __init__(self, encoding: Any, name: str) -> None:
        self.name, self.vocabulary = name, _vocabulary(encoding.n_vocab, name)
        self._parts = (encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens)
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda pair: pair[1])
        self.identity = _digest(repr((encoding._pat_str, ranks, encoding._special_tokens)).encode())
        self._sizes = np.zeros(self.vocabulary, dtype=np.int32)
        for word, rank in ranks:
            self._sizes[rank] = len(word)

    @cached_property
    def _encoding(self) -> Any:
        pattern, ranks, special = self._parts
        return _imported("tiktoken").Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_encoding"}

    def _encode(self, text: str) -> Tokens:
        ids = np.array(self._encoding.encode_ordinary(text), dtype=np.int32)
        return Tokens(ids, self._sizes[ids])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode(list(ids), errors="replace")
        return text


class OwnTokenizer(Tokenizer):
    """The user's object with `encode(text) -> ids` and `decode(ids) -> text`.

    A token's bytes are those by which it lengthens the decoded text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._own = tokenizer
        self.name = type(tokenizer).__name__
        self.vocabulary = _vocabulary(_vocabulary_of(tokenizer), self.name)
        self.identity = self.name  # its tokens have a fingerprint of their own

    def _encode(self, text: str) -> Tokens:
        ids = [int(one) for one in self._own.encode(text)]
        sizes = np.zeros(len(ids), dtype=np.int32)
        begin = start = done = 0  # `start`: the character before, of `done` ones, since alone the next may lose a space
        for index in range(len(ids)):
            decoded = self.decode(ids[start : index + 1])
            if decoded.endswith("\N{REPLACEMENT CHARACTER}") and index + 1 < len(ids):
                continue  # the character is incomplete
            sizes[index] = len(decoded[done:].encode("utf-8", "replace"))
            start, done = begin, len(self.decode(ids[begin : index + 1]))
            begin = index + 1
        return Tokens(np.array(ids, dtype=np.int64), sizes)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(list(ids)))


BYTES = ByteTokenizer()


def find_tokenizer(named: object) -> Tokenizer:
    """A tokenizer by name, or from an object.

    Raises:
        ValueError: no such tokenizer, its file is damaged, its library is missing, or the object is no tokenizer.
    """
    if isinstance(named, Tokenizer):
        return named
    if not isinstance(named, str):
        return _of_object(named)
    if named == BYTES.name:
        return BYTES
    source, colon, rest = named.partition(":")
    if not (colon and rest and source in ("hf", "tiktoken")):
        near = difflib.get_close_matches(named, ["bytes"], n=1)
        fail(f"a tokenizer: {NAMED}", repr(named), f"Did you mean {near[0]}?" if near else "Name one of them.")
    return _hugging_face(rest, named) if source == "hf" else _tiktoken(rest, named)


def _of_object(tokenizer: Any) -> Tokenizer:
    library = type(tokenizer).__module__.partition(".")[0]
    fast = getattr(tokenizer, "backend_tokenizer", None)  # of transformers
    if library == "tokenizers" and hasattr(tokenizer, "to_str"):
        return HuggingFaceTokenizer(tokenizer.to_str(), type(tokenizer).__name__)
    if fast is not None and hasattr(fast, "to_str"):
        return HuggingFaceTokenizer(fast.to_str(), type(tokenizer).__name__)
    if library == "tiktoken" and hasattr(tokenizer, "encode_ordinary"):
        return TikToken(tokenizer, str(tokenizer.name).replace(":", " "))
    if all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        return OwnTokenizer(tokenizer)
    fail(f"{NAMED}, or an object with encode and decode", shape_of(tokenizer), "Pass one of them as tokenizer.")


def _vocabulary_of(tokenizer: Any) -> int:
    """The number of tokens of a user's tokenizer, as libraries name it: `vocab_size`, `n_vocab` or `get_vocab_size`."""
    for name in ("vocab_size", "n_vocab", "get_vocab_size"):
        count = getattr(tokenizer, name, None)
        count = count() if callable(count) else count
        if isinstance(count, int) and count > 0:
            return max(count, len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    fail("a tokenizer with vocab_size, the number of its tokens", shape_of(tokenizer), "Give it that attribute.")


def _hugging_face(name: str, named: str) -> Tokenizer:
    _require_installed("tokenizers")
    require_utf8(Path(name), "a tokenizer")
    path = Path(name).expanduser()
    if path.is_dir():
        path /= _JSON
    elif not path.exists():
        path = _cached(name)
    try:
        description = read_file(path, _FILE_AT_MOST).decode("utf-8")
    except (FileError, UnicodeDecodeError) as error:
        came = error if isinstance(error, FileError) else FileError("it is no UTF-8")
        fail_to_read("a tokenizer.json", path, came, "Save it with tokenizer.save_pretrained(FOLDER).")
    return HuggingFaceTokenizer(description, named)


def _cached(name: str) -> Path:
    """tokenizer.json of a name, from the cache of Hugging Face's library. Nothing is fetched: a comparison would change
    with the hub."""
    _require_installed("huggingface_hub")
    try:
        return Path(_imported("huggingface_hub").hf_hub_download(name, _JSON, local_files_only=True))
    except Exception as error:  # it is no name, or not in the cache
        expected = "a folder or a file after hf:, or a name whose tokenizer.json is in Hugging Face's cache"
        remedy = (
            f"Run hf download {name} tokenizer.json." if type(error).__name__ != "HFValidationError" else "Name one."
        )
        fail(expected, name, remedy)


def _tiktoken(name: str, named: str) -> Tokenizer:
    _require_installed("tiktoken")
    if name.endswith(".tiktoken"):
        return _of_ranks(Path(name).expanduser(), named)
    tiktoken = _imported("tiktoken")
    known = tiktoken.list_encoding_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "Name one of them, or a file of ranks, FILE.tiktoken."
        fail(f"an encoding of tiktoken ({', '.join(known)})", repr(name), remedy)
    try:
        return TikToken(tiktoken.get_encoding(name), named)
    except Exception as error:  # of the network
        said = " ".join(str(error).split())[:160]
        remedy = "Fetch it where there is a network and set TIKTOKEN_CACHE_DIR, or name FILE.tiktoken."
        fail(f"the ranks of {name}, which tiktoken downloads", f"{type(error).__name__}: {said}", remedy)


def _of_ranks(path: Path, named: str) -> Tokenizer:
    """A file of ranks: in each line a token in base64 and its rank. Its text is split as by cl100k_base."""
    expected = "a file of ranks"
    if not path.exists():
        fail(expected, f"{path}, which does not exist", "Name an existing one.")
    try:
        lines = read_file(path, _FILE_AT_MOST).splitlines()
        ranks = {
            base64.b64decode(word, validate=True): int(rank) for word, rank in (line.split() for line in lines if line)
        }
    except FileError as error:
        fail_to_read(expected, path, error, "Name another.")
    except ValueError:
        fail(expected, f"{path}, whose lines are not a token in base64 and a rank", "Name another.")
    if sorted(ranks.values()) != list(range(len(ranks))) or not {bytes([one]) for one in range(256)} <= ranks.keys():
        fail("ranks from 0 on, with all 256 bytes", f"{path} with {len(ranks):,} others", "Name another.")
    tiktoken = _imported("tiktoken")
    return TikToken(tiktoken.Encoding(named, pat_str=_CL100K, mergeable_ranks=ranks, special_tokens={}), named)


_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
"""How cl100k_base splits a text before it merges: `tiktoken_ext/openai_public.py` of tiktoken 0.14."""


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most `_PIECE` characters, cut after a line break where there is one."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _PIECE)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _vocabulary(count: int, name: str) -> int:
    if not 0 < count <= _TOKENS_AT_MOST:
        fail(f"a tokenizer with 1 to {_TOKENS_AT_MOST:,} tokens", f"{name} with {count:,}", "Choose another.")
    return count


@contextmanager
def _in_rust(expected: str, remedy: str) -> Iterator[None]:
    """Turn an error of a library in Rust into one line; its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())[:160]
        raise ValueError(visible(f"expected {expected}: {said}. {remedy}")) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _imported(name: str) -> Any:
    return importlib.import_module(name)


def _require_installed(library: str) -> None:
    try:
        _imported(library)
    except ImportError as error:
        fail(f"{library}, importable", str(error), "Run pip install 'relpos[data]'.")
