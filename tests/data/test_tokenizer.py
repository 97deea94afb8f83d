"""Tokenizers: every byte of a text is in one token, and one that loses text is refused."""

import base64
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from relpos.data import tokenizer as subject
from relpos.data.tokenizer import BYTES, find_tokenizer

TEXT = "  the cat sat on the mat, and the dog sat\n\n\tover there. Größe, 東京 🦊🦊: 'naïve' the end \n"
PATTERN = r"\p{L}+|\s+|[^\s\p{L}]+"


def byte_level(**changes: Any) -> Tokenizer:
    """Byte pairs, as GPT-2's; `changes` are attributes of it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def sentence_piece() -> Tokenizer:
    """Words with their space before them, and bytes for what is unknown, as Llama 2's."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])  # type: ignore[assignment]
    special = ["<unk>", *(f"<0x{one:02X}>" for one in range(256))]
    made.train_from_iterator(
        ["the cat sat on the mat"], trainers.BpeTrainer(vocab_size=280, special_tokens=special, show_progress=False)
    )
    return made


def ranks() -> dict[bytes, int]:
    return {
        word: rank for rank, word in enumerate([*(bytes([one]) for one in range(256)), b"th", b"the", b"at", b"  "])
    }


class Own:
    """A user's object over another tokenizer, with nothing but these."""

    def __init__(self, inner: tiktoken.Encoding) -> None:
        self.vocab_size, self.inner = inner.n_vocab, inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)


class Pieces:
    """The same over SentencePiece's, whose first token loses its space."""

    vocab_size = 280

    def __init__(self) -> None:
        self.inner = sentence_piece()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=False)


def encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={"<|end|>": 260})


def named(kind: str, folder: Path) -> object:
    """A tokenizer as a user names it or hands it over."""
    byte_level().save(str(folder / "tokenizer.json"))
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks().items()]
    (folder / "own.tiktoken").write_bytes(b"".join(lines))
    return {
        "bytes": "bytes",
        "folder": f"hf:{folder}",
        "file": f"hf:{folder / 'tokenizer.json'}",
        "object of tokenizers": byte_level(),
        "sentencepiece": sentence_piece(),
        "trimmed": byte_level(post_processor=processors.ByteLevel(trim_offsets=True)),
        "ranks": f"tiktoken:{folder / 'own.tiktoken'}",
        "object of tiktoken": encoding(),
        "own": Own(encoding()),
        "own with pieces": Pieces(),
    }[kind]


KINDS = (
    "bytes",
    "folder",
    "file",
    "object of tokenizers",
    "sentencepiece",
    "trimmed",
    "ranks",
    "object of tiktoken",
    "own",
    "own with pieces",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TEXT, "the", " the", "🦊", "\n\n", ""])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(named(kind, tmp_path))
    data = text.encode()
    tokens = tokenizer.encode(data)
    assert tokens.ids.shape == tokens.sizes.shape
    assert tokens.sizes.sum() == len(data)
    assert tokenizer.decode(tokens.ids.tolist()).strip() == text.strip()
    before = 0  # every beginning of the tokens covers a beginning of the text, but for a character of several tokens
    for count, size in enumerate(tokens.sizes.tolist(), 1):
        before += size
        said = tokenizer.decode(tokens.ids[:count].tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
        assert data[:before].decode("utf-8", "ignore").strip().startswith(said.strip())
    other = pickle.loads(pickle.dumps(tokenizer))
    assert np.array_equal(other.encode(data).ids, tokens.ids)
    assert (other.name, other.vocabulary, other.identity) == (tokenizer.name, tokenizer.vocabulary, tokenizer.identity)
    assert tokens.ids.max(initial=0) < tokenizer.vocabulary


def test_byte_pairs_count_the_bytes_of_their_words(tmp_path: Path) -> None:
    tokens = find_tokenizer(named("ranks", tmp_path)).encode(b"that the")
    assert tokens.ids.tolist() == [256, 258, 32, 257]
    assert tokens.sizes.tolist() == [2, 2, 1, 3]
    assert BYTES.encode(b"\xff\x00").ids.tolist() == [255, 0], "bytes need no UTF-8"


def test_a_long_text_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PIECE", 16)
    assert list(subject._pieces("abc\ndef\nghijklmnopq")) == ["abc\ndef\n", "ghijklmnopq"]
    assert list(subject._pieces("x" * 20)) == ["x" * 16, "x" * 4]
    for tokenizer in (find_tokenizer(sentence_piece()), find_tokenizer(byte_level())):
        tokens = tokenizer.encode(TEXT.encode())
        assert tokens.sizes.sum() == len(TEXT.encode())


def test_a_name_shows_no_folder(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert find_tokenizer(named("folder", mine)).label == "hf:mine"
    assert find_tokenizer(named("file", mine)).label == "hf:mine"
    assert find_tokenizer(named("ranks", mine)).label == "tiktoken:own.tiktoken"
    assert find_tokenizer(encoding()).label == "own"


def test_changed_tokens_are_another_tokenizer() -> None:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    first, second = find_tokenizer(byte_level()), find_tokenizer(byte_level(pre_tokenizer=whole))
    assert first.identity != second.identity
    assert find_tokenizer(encoding()).identity == find_tokenizer(encoding()).identity


def unknown() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return made


class Short(Own):
    """Claims fewer tokens than it gives."""

    def encode(self, text: str) -> list[int]:
        return [self.vocab_size + 1]

    def decode(self, ids: list[int]) -> str:
        return "The cat"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            byte_level(normalizer=normalizers.Lowercase()),
            "every character of the text; got Tokenizer, which makes",
        ),
        (byte_level(normalizer=normalizers.Strip()), "keeps every character"),
        (unknown(), "keeps every character"),
        (Tokenizer(models.WordLevel({"the": 1})), "expected a tokenizer for any text; got Tokenizer: WordLevel error"),
        (Short(encoding()), r"tokens of Short from 0 to 260; got 262 to 262"),
    ],
    ids=["lower case", "stripped", "unknown words", "no token for them", "beyond its vocabulary"],
)
def test_a_tokenizer_that_loses_text_is_refused(tokenizer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        find_tokenizer(tokenizer).encode(b"The cat" if "Short" in message else b"The  dog\n sat ")
    assert "\n" not in str(caught.value)


def test_text_for_tokens_is_utf_8() -> None:
    with pytest.raises(ValueError, match=r"a text in UTF-8 for the tokenizer Tokenizer; got the byte 0xff at 3"):
        find_tokenizer(byte_level()).encode(b"abc\xff")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte", r"got 'byte'\. Did you mean bytes\?"),
        ("hf:", "a tokenizer: bytes, hf:NAME or tiktoken:NAME"),
        ("hf:nobody/nothing-here", r"got nobody/nothing-here\. Run hf download nobody/nothing-here tokenizer\.json"),
        ("hf:{folder}", r"tokenizer\.json; got .*tokenizer\.json \(it cannot be read"),
        ("hf:{folder}/damaged", r"a tokenizer\.json of tokenizers; got hf:.*damaged: expected ident"),
        ("hf:{folder}/vast", r"1 to 16,777,216 tokens; got hf:.*vast with 1,000,000,001"),
        ("tiktoken:cl100k", r"got 'cl100k'\. Did you mean cl100k_base\?"),
        ("tiktoken:{folder}/absent.tiktoken", "which does not exist"),
        ("tiktoken:{folder}/damaged.tiktoken", "not a token in base64 and a rank"),
        ("tiktoken:{folder}/few.tiktoken", "ranks from 0 on, with all 256 bytes"),
        (3, "an object with encode and decode; got int 3"),
    ],
)
def test_no_such_tokenizer_is_one_line(name: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_text("no JSON")
    few = Tokenizer(models.WordLevel({"the": 77})).to_str()
    (tmp_path / "vast").write_text(few.replace("77", "1000000000"))  # writing it itself takes seconds
    (tmp_path / "damaged.tiktoken").write_text("no ranks here\n")
    (tmp_path / "few.tiktoken").write_bytes(base64.b64encode(b"a") + b" 0\n")
    with pytest.raises(ValueError, match=message) as caught:
        find_tokenizer(name.format(folder=tmp_path) if isinstance(name, str) else name)
    assert "\n" not in str(caught.value)


def test_an_encoding_that_cannot_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(
        ValueError, match=r"the ranks of gpt2, which tiktoken downloads; got OSError: no network at all"
    ):
        find_tokenizer("tiktoken:gpt2")
