"""A user's error is one line and exit code 2: what was expected and what came, at once; nothing is written."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import relpos.comparison.entry as call
import relpos.data

FAST_CASES = 20  # of each of its tests, in the fast part

Refused = Callable[..., str]

# What is typed in `folder`, what the line says.
VERBS = [
    ("", r"expected a verb; got none\. See relpos --help"),
    ("compar", r"invalid choice: 'compar' \(choose from 'compare', .*\)\. Did you mean compare\? See relpos --help"),
    ("frobnicate", r"invalid choice: 'frobnicate' \(choose from 'compare', .*'list', 'vectors'\)\. See relpos --help"),
    ("list", r"the following arguments are required: KIND\. See relpos list --help"),
    ("list position", r"KIND: invalid choice: 'position' \(choose from .*\)\. Did you mean positions\? See"),
    ("list positions extra", r"unrecognized arguments: extra\. See relpos list --help"),
]
TRAIN = [
    ("--position none", r"the following arguments are required: --out\. See relpos train --help"),
    ("--out new", r"the following arguments are required: --position\. See"),
    ("--out new --position relativ_2d", r"the name of a position; got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("--out new --position none+lerned", r"got 'lerned'\. Did you mean 'learned'\?"),
    ("--out new --position none --stepz 3", r"unrecognized arguments: --stepz 3\. Did you mean --steps\?"),
    ("--out new --position none --steps x", r"argument --steps: expected a whole number; got 'x'\. See"),
    ("--out new --position none --steps 2.5", r"argument --steps: expected a whole number; got '2\.5'\."),
    ("--out new --position none --optimizer sgd", r"invalid choice: 'sgd' \(choose from 'adamw', 'lion'"),
    ("--out new --position none --rotate", r"a folder of images as data with rotate; got digits"),
    ("--out new --position none --data classes/gone", r"data as .*; got .*gone, which does not exist"),
]
COMPARE = [
    ("--positions relativ_2d", r"the name of a position; got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("--positions ,", r"expected at least one position; got none\. Name some"),
    ("--positions", r"argument --positions: expected one argument\. See relpos compare --help"),
    ("--task digits", r"unrecognized arguments: --task digits\."),
    ("--images classes", r"unrecognized arguments: --images "),
    ("--text classes", r"unrecognized arguments: --text "),
    ("--model timm:vit_tiny_patch16", r"a model of timm; got 'vit_tiny_patch16'\. Did you mean vit_tiny_patch16_"),
    ("--model hf:gone", r"a folder with config\.json after hf:; got gone\. Save a model there"),
    (
        "--model vit.py",
        r"swin, timm:NAME, torchvision:NAME, hf:FOLDER, or build\(position, task\) as .*; got 'vit\.py'\. Pass",
    ),
    ("--model gone.py:build", r"expected FILE\.py:NAME of a file that is there; got .*gone\.py, which is not"),
    ("--better lower", r"expected better only with evaluate; got better='lower' alone\. Leave it out"),
    ("--set weight_decay=0.1", r"expected --set recipe\.KEY=VALUE; got --set weight_decay=0\.1\. Write for"),
    ("--set recipe.weigth_decay=1", r"a field of the recipe among .*; got 'weigth_decay'\. Did you mean 'weig"),
    ("--data text --set recipe.window=[8,0]", r"expected window to be an integer of at least 1; got int 0"),
    ("--set recipe.depth=x", r"expected the recipe's depth to be an integer of at least 1; got str 'x'"),
    ("--lr=-1", r"argument --lr: expected a number of at least 0; got '-1'"),
    ("--lr fast", r"argument --lr: expected a number of at least 0; got 'fast'"),
    ("--quick yes", r"unrecognized arguments: yes\. See relpos compare --help"),
    ("--device gpu", r"expected a device \(auto, cpu, cuda, cuda:0\); got 'gpu'"),
    ("--device cuda", r"expected a device that this machine has; got 'cuda'\. .*use --device cpu"),
    ("--precision fp8", r"--precision: invalid choice: 'fp8' \(choose from 'float32', 'bf16-mixed', 'fp16-mixed'\)"),
    ("--what norms", r"--what: invalid choice: 'norms' \(choose from .*\)\. Did you mean norm\? See relpos comp"),
    ("--out full/mine.png", r"expected a folder for --out; .*mine\.png is a file\. Choose another --out"),
    ("--out full", r"expected an empty folder .*holds other files\. Choose another --out"),
    ("--data digit", r"data as a folder of images, .*, digits or text; got digit, which .* Did you mean digits\?"),
    ("--data classes/gone", r"expected data as .*; got classes/gone, which does not exist\. Name one of them\."),
    ("--data classes", r"expected images in .*classes, in a folder for each class; got no folders in it"),
    ("--data", r"argument --data: expected one argument\. See relpos compare --help"),
    ("--patch 4", r"a folder of images as data with patch; got digits\. Name the folder, or leave patch out"),
    ("--image-size 4 --rotate", r"a folder of images as data with image_size, rotate; got digits"),
    ("--max-pixels 5", r"a folder of images as data with max_pixels; got digits"),
    ("--data text --bad-images skip", r"a folder of images as data with bad_images; got text"),
    ("--data classes --image-size big", r"expected N or HxW for --image-size; got 'big'\. Write --image-size 64,"),
    ("--data classes --image-size -4", r"expected N or HxW for --image-size; got '-4'|expected one argument"),
    ("--data classes --image-size 60", r"image size divisible by the patch size 8 x 8; got 60 x 60\. Take 56 or 64"),
    (
        "--data classes --image-size 80x80000000",
        r"height and width of at most 4,096 pixels for --image-size; got '80x80000000'\.",
    ),
    ("--data classes --patch 2x3x4", r"expected N or HxW for --patch; got '2x3x4'"),
    ("--data classes --patch 0", r"patch to be an integer of at least 1; got int 0"),
    ("--data classes --max-pixels 1e8", r"argument --max-pixels: expected a whole number; got '1e8'"),
    ("--data classes --bad-images leave", r"invalid choice: 'leave' \(choose from 'error', 'skip'\)"),
]
SHOW = [
    ("", r"expected a position or --weights FILE; got neither\. Write relpos show relative_2d"),
    ("alibi --weights full", r"expected a position or --weights FILE; got 'alibi' and --weights"),
    ("relativ_2d", r"got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("relative_2d --length 16", r"expected --grid for relative_2d, .*; got --length 16\. Write --grid 8x8\."),
    ("alibi --length 16 --grid 4x4", r"expected one of --length and --grid; got --length 16 and --grid 4x4"),
    ("alibi --length 0", r"--length to be an integer of at least 1; got int 0"),
    ("alibi --length 5000", r"at most 4096 tokens in a picture; got 5000"),
    ("alibi --grid 8", r"expected --grid as rows x columns of at least 1; got '8'\. Write for example --grid 8x8"),
    ("alibi --grid 0x8", r"got '0x8'\. Write for example"),
    ("alibi --grid 8x8x8", r"got '8x8x8'\. Write for example"),
    ("alibi --grid 100x100", r"at most 4096 tokens in a picture; got 10000"),
    ("alibi --query 16", r"expected --query from 0 to 15; got 16\. Tokens are numbered from 0"),
    ("alibi --query -1", r"expected --query from 0 to 15; got -1"),
    ("alibi --heads 0", r"--heads to be an integer of at least 1; got int 0"),
    ("alibi --seed -1", r"--seed to be an integer of at least 0; got int -1"),
    ("sinusoidal_1d --heads 1 --head-dim 5", r"a multiple of 2; got 5\. .*5 wide \(--head-dim\)"),
    ("rotary_2d --head-dim 3", r"head_dim to be an integer of at least 4; got int 3.*\(--head-dim\)"),
    ("alibi --out full", r"expected a file for --out; got the folder full\. Write for example"),
    ("alibi --out x.docx", r"expected --out to end in one of \.png, \.svg, \.pdf; got x\.docx"),
    ("alibi --out full/x", r"expected --out to end in one of .*got full/x\. Write for example --out x\.png"),
    ("alibi --out no/x.png", r"expected --out in a folder that exists; got .*Create no first"),
    ("alibi --out full/mine.png", r"a file that does not exist yet; got full/mine\.png\. .*nothing is overwritten"),
    ("--page full/page.html", r"expected a file that does not exist yet"),
    ("--page x.png", r"expected --page to end in \.html"),
    ("--page y.html --grid 8x8", r"expected --page alone, or with a position; got --page"),
]
WEIGHTS = [  # of relpos, then of others
    ("full", r"expected a folder with model\.safetensors and config\.json; got .*relpos train --out DIR"),
    ("full/gone", r"expected a model's folder or its weights for --weights; got full/gone, which does not"),
    ("full/mine.png", r"expected a model's folder or its model\.safetensors for --weights; got the file"),
    ("full --heads 4", r"expected --weights alone; got --weights and --heads\. .*leave --heads out"),
    ("model --heads 3", r"expected --weights alone; got --weights and --heads\. .*leave --heads out"),
    ("model --query 3", r"got --weights and --query\. The page has every head and offset"),
    ("model --out x.png", r"expected --out to end in \.html; got x\.png\. Write for example --out x\.html"),
    ("model --out no/x.html", r"expected --out in a folder that exists"),
    ("model --out full/page.html", r"expected a file that does not exist yet; got full/page\.html"),
    ("no.safetensors", r"got no\.safetensors, which does not exist"),
    ("no --out x.html", r"expected a folder or a \.safetensors file; got no, which does not exist"),
    ("full/mine.png --out x.html", r"expected a folder or a \.safetensors file; got the file full/mine\.png"),
    ("broken.safetensors", r"expected safetensors that can be read; got broken\.safetensors \("),
    ("classes --out x.html", r"one index of shards; got 0 of them in classes\. Name the file"),
    ("two", r"one index of shards; got 2 of them in two\. Name the file"),
    ("plain.safetensors", r"a learned position \(relative_attention_bias, .*with none among its 1 parameters"),
    ("odd.safetensors", r"odd\.safetensors, whose a\.rel_pos_h cannot be drawn: it has 4 rows, an even number"),
    ("away", r"an index of shards; got .* \(its shard '\.\./model/model\.safetensors' is not beside it\)"),
    ("unmapped", r"an index of shards; got .* \(it has no weight_map from names to files\)"),
    ("torn", r"an index of shards; got .* \(it is not readable JSON"),
]
BENCH = [
    ("--cases line-4096-float32-stp", r"got 'line-4096-float32-stp'\. Did you mean 'line-4096-float32-step'"),
    ("--engines flash", r"expected an engine among auto, .*; got 'flash'"),
    ("--engines ,", r"expected at least one engine; got none"),
    ("--out full", r"expected an empty folder .*holds other files\. Choose another --out"),
]
CHECK = [
    ("--engines tritn", r"an engine among triton, streaming, sdpa, flex; got 'tritn'\. Did you mean 'triton'\?"),
    ("--engines ,", r"expected an engine among .*; got ','\. Choose one"),
    ("--engines reference", r"expected an engine among .*; got 'reference'"),
]
RETROFIT = [
    ("resnet", r"expected hf:FOLDER, timm:NAME or torchvision:NAME; got 'resnet'"),
    ("hf:nowhere", r"expected a folder with config\.json after hf:; got nowhere"),
    ("timm:beit_bas_patch16_224", r"Did you mean beit_base_patch16_224"),
    ("timm:vit_tiny_patch16_224", r"got VisionTransformer, which has no known relative position"),
    ("timm:x --lengths a", r"expected --lengths from 2 to 1,048,576, joined by commas; got 'a'"),
    ("timm:x --train --forward", r"expected one of --train and --forward; got both"),
]
VECTORS = [
    ("", r"the following arguments are required: OUT"),
    ("model/config.json", r"expected a file that does not exist yet; got model/config\.json\. Choose another OUT"),
    ("full", r"expected a file for OUT; got the folder full\. Write for example OUT full/show\.json"),
    ("x.txt", r"expected OUT to end in \.json; got x\.txt\. Write for example OUT x\.json"),
    ("no/x.json", r"expected OUT in a folder that exists; got no/x\.json\. Create no first"),
]
OF_VERBS = {
    "train": TRAIN, "compare": COMPARE, "show": SHOW, "show --weights": WEIGHTS, "bench": BENCH, "check": CHECK,
    "retrofit": RETROFIT, "vectors": VECTORS,
}  # fmt: skip
EVERY = [*VERBS, *((f"{verb} {typed}", says) for verb, table in OF_VERBS.items() for typed, says in table)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What people have lying about: their work, a folder without images, and weights, most of them damaged."""
    here = tmp_path_factory.mktemp("here")
    for name in ("full", "classes", "model", "two", "away", "unmapped", "torn"):
        (here / name).mkdir()
    for name in ("full/mine.png", "full/page.html", "broken.safetensors"):
        (here / name).write_text("mine")
    save_file({"relative_attention_bias.weight": torch.zeros(32, 3)}, here / "model/model.safetensors")
    (here / "model/config.json").write_text('{"model_type": "t5"}')
    save_file({"a": torch.zeros(2)}, here / "plain.safetensors")
    save_file({"a.rel_pos_h": torch.zeros(4, 2)}, here / "odd.safetensors")
    indices = {"away": '{"weight_map": {"a": "../model/model.safetensors"}}', "unmapped": '{"weight_map": {}}'}
    for name in ("two", "away", "unmapped", "torn"):
        for file in ("a", "b"):
            save_file({file: torch.zeros(2)}, here / name / f"{file}.safetensors")
        if name != "two":
            (here / name / "model.safetensors.index.json").write_text(indices.get(name, "{"))
    return here


def found(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("typed", "says"), EVERY, ids=[typed or "nothing" for typed, _ in EVERY])
def test_a_users_error_is_one_line_and_changes_nothing(
    typed: str,
    says: str,
    folder: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "timm:" in typed:
        request.getfixturevalue("timm")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = found(folder)
    line = refused(typed)
    assert re.search(says, line), line
    assert found(folder) == before


@pytest.mark.parametrize(
    "typed",
    [
        "compare --data DIR --positions relativ_2d",
        "compare --data DIR --seeds 0",
        "compare --data DIR --device gpu",
        "train --data DIR --position relativ_2d --out OUT",
        "train --data DIR --position none --out OUT --threads 0",
        "train --data DIR --position none --out OUT --device gpu",
    ],
)
def test_nothing_is_read_before_the_rest_fits(typed: str, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("it reads images first")

    monkeypatch.setattr(relpos.data, "find_data", read)
    monkeypatch.setattr(call, "find_data", read)
    assert "expected" in refused(typed)
