"""Learned positions found in weights by name: each number stands at the offset where the published model adds it."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import relpos
from relpos.adapters.common.libraries import imported
from relpos.core.densify import expand_regular
from relpos.files.tensors import StoredTensors, open_tensors
from relpos.report.drawing.mechanism_picture import Bars, Maps
from relpos.report.drawing.stored_positions import Stored, stored_positions

pytestmark = pytest.mark.usefixtures("timm")


def kept(state: dict[str, Tensor], folder: Path) -> StoredTensors:
    save_file({name: x.detach().contiguous().clone() for name, x in state.items()}, folder / "x.safetensors")
    return open_tensors(folder)


def perturbed(model: nn.Module) -> Any:
    for name, x in model.named_parameters():
        if "rel" in name or "positions" in name:
            nn.init.normal_(x, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def found_in(model: nn.Module, folder: Path, config: dict[str, Any] | None = None) -> list[Stored]:
    found, left = stored_positions(kept(model.state_dict(), folder), config or {})
    assert not left
    return found


def at(one: Stored, *offset: int) -> Any:
    """What the first picture has at an offset, for every head."""
    (picture,) = one.pictures
    if isinstance(picture, Bars):
        return picture.values[:, int(offset[0] - picture.along.first)]
    return picture.values[:, int(offset[0] - picture.rows.first), int(offset[1] - picture.columns.first)]


def on_grid(rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Every query and key of a grid, and their offset in rows and in columns."""
    for i, j in product(range(rows * columns), repeat=2):
        (r, c), (s, d) = divmod(i, columns), divmod(j, columns)
        yield i, j, r - s, c - d


@pytest.mark.parametrize("distance", [20, 128])
def test_t5(distance: int, tmp_path: Path) -> None:
    transformers = imported("transformers")
    config = transformers.T5Config(
        vocab_size=90, d_model=16, d_kv=4, num_heads=3, num_layers=2, d_ff=16, relative_attention_num_buckets=8,
        relative_attention_max_distance=distance,
    )  # fmt: skip
    model = perturbed(transformers.T5Model(config))
    encoder, decoder = found_in(model, tmp_path, config.to_dict())
    for one, stack in ((encoder, model.encoder), (decoder, model.decoder)):
        count = distance + 1
        dense = stack.block[0].layer[0].SelfAttention.compute_bias(count, count)[0].detach().numpy()
        for i in range(count):
            for j in range(i + 1 if stack is model.decoder else count):
                assert np.allclose(at(one, i - j), dense[:, i, j])
    assert encoder.name == "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert decoder.pictures[0].along.first == 0  # type: ignore[union-attr]
    (unsaid, _), _ = stored_positions(open_tensors(tmp_path), {})
    assert "Drawn for a largest distance of 128, as in T5: the weights do not contain it." in unsaid.note


@pytest.mark.parametrize("index", [True, False])
def test_swin(index: bool, tmp_path: Path) -> None:
    module = imported("timm").models.swin_transformer
    window = (4, 3) if index else (4, 4)
    model = perturbed(module.WindowAttention(16, 2, window_size=window))
    state = {**model.state_dict(), **({"relative_position_index": model.relative_position_index} if index else {})}
    (one,), _ = stored_positions(kept(state, tmp_path), {})
    last = 2 if index else 3
    assert one.offsets == f"\N{MINUS SIGN}3 to +3 rows, \N{MINUS SIGN}{last} to +{last} columns"
    dense = model._get_rel_pos_bias()[0].detach().numpy()
    for i, j, down, right in on_grid(*window):
        assert np.allclose(at(one, down, right), dense[:, i, j])


def test_beit_with_its_class_token(tmp_path: Path) -> None:
    model = perturbed(imported("timm").models.beit.Attention(16, 2, window_size=(3, 3)))
    (one,), _ = stored_positions(kept(model.state_dict(), tmp_path), {})
    dense = model._get_rel_pos_bias()[0].detach().numpy()
    for i, j, down, right in on_grid(3, 3):
        assert np.allclose(at(one, down, right), dense[:, 1 + i, 1 + j])
    assert one.kind == "table with a class token"
    assert one.rest[0] == ("head", "class to patch", "patch to class", "class to class")
    for head, row in enumerate(one.rest[1:]):
        said = [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in row]
        assert said == pytest.approx([head, dense[head, 0, 5], dense[head, 5, 0], dense[head, 0, 0]], abs=6e-4)


def test_deberta(tmp_path: Path) -> None:
    transformers = imported("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=90, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        relative_attention=True, position_buckets=8, max_relative_positions=32, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    model = perturbed(transformers.DebertaV2Model(config))
    (one,) = found_in(model, tmp_path)
    bars, maps = one.pictures
    vectors = model.encoder.rel_embeddings.weight.detach().double()
    assert isinstance(bars, Bars)
    assert (bars.along.first, one.heads, one.offsets) == (-8, 0, "buckets \N{MINUS SIGN}8 to +7")
    where = imported("transformers.models.deberta_v2.modeling_deberta_v2").build_relative_position(
        torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), bucket_size=8, max_position=32
    )
    for i in range(5):
        for j in range(5):
            bucket = int(where[0, i, j])
            assert bucket == i - j
            assert bars.values[0, bucket + 8] == pytest.approx(float(vectors[bucket + 8].norm()))
    assert isinstance(maps, Maps)
    centred = vectors - vectors.mean(0)
    wanted = nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1)
    assert np.allclose(maps.values[0], wanted.numpy())


@pytest.mark.parametrize("eps", [1e-7, 1e-1])
def test_deberta_with_a_norm_of_its_vectors(eps: float, tmp_path: Path) -> None:
    transformers = imported("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=90, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm", layer_norm_eps=eps,
    )  # fmt: skip
    model = perturbed(transformers.DebertaV2Model(config))
    for x in model.encoder.LayerNorm.parameters():
        nn.init.normal_(x, 1.0)
    (one,) = found_in(model, tmp_path, config.to_dict())
    vectors = model.encoder.get_rel_embedding().detach().double()
    bars, _ = one.pictures
    assert isinstance(bars, Bars)
    assert np.allclose(bars.values[0], vectors.norm(dim=1).numpy(), rtol=1e-5)
    assert one.note.endswith("Drawn after encoder.LayerNorm, which the model applies to them.")
    (unsaid,), _ = stored_positions(open_tensors(tmp_path), {})
    assert np.allclose(unsaid.pictures[0].values[0], bars.values[0], rtol=1e-5) == (eps == 1e-7)


def test_sam(tmp_path: Path) -> None:
    transformers = imported("transformers")
    config = transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=16, image_size=64, window_size=0,
        global_attn_indexes=[0],
    )  # fmt: skip
    model = perturbed(transformers.SamVisionModel(config))
    rows, columns = found_in(model, tmp_path)
    attn = model.vision_encoder.layers[0].attn
    assert rows.name == "vision_encoder.layers.0.attn.rel_pos_h"
    for one, vectors in ((rows, attn.rel_pos_h), (columns, attn.rel_pos_w)):
        met = attn.get_rel_pos(4, 4, vectors).detach().double()
        bars = one.pictures[0]
        assert isinstance(bars, Bars)
        for i in range(4):
            for j in range(4):
                assert bars.values[0, int(i - j - bars.along.first)] == pytest.approx(float(met[i, j].norm()))


def _gpt2() -> Any:
    transformers = imported("transformers")
    return transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=90, n_embd=16, n_layer=2, n_head=2, n_positions=12)
    )


def _vit() -> Any:
    return imported("timm").models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3
    )


@pytest.mark.parametrize(
    ("build", "position", "kind"),
    [
        (_gpt2, "relative_1d", "table of a sequence"),
        (_vit, "relative_2d", "table with a class token"),
        (_gpt2, "t5", "T5 buckets"),
        (_gpt2, "shaw", "vectors of offsets"),
        (_vit, "decomposed", "vectors of row offsets"),
        (_vit, "factored_2d", "table of row offsets"),
    ],
)
def test_replaced_positions(build: Callable[[], Any], position: str, kind: str, tmp_path: Path) -> None:
    model = build()
    relpos.replace_position(model, position, init_std=0.5)
    found = found_in(model, tmp_path)
    assert found[0].kind == kind
    for layer in range(2):
        assert any(f"positions.{layer}." in one.name for one in found)
    if position == "relative_1d":
        dense = model.positions[0].mechanisms[0]().detach().numpy()
        for i in range(12):
            for j in range(12):
                assert np.allclose(at(found[0], i - j), dense[:, i, j])
    if position == "factored_2d":
        line = model.blocks[0].attn.layer_position.terms(17, 17).of(relpos.LineBias)[0]
        dense = expand_regular(line.values, line.lines).detach().numpy()
        rows, columns = found[:2]
        for i, j, down, right in on_grid(4, 4):
            assert np.allclose(at(rows, down) + at(columns, right), dense[:, 1 + i, 1 + j], atol=1e-6)
    if position == "t5":  # a decoder that has no encoder: what of the buckets is read is its mechanism's
        mechanism = model.positions[0].mechanisms[0]
        line = mechanism.terms(relpos.Sequence(13)).of(relpos.LineBias)[0]
        assert np.allclose(at(found[0], 12), line.values[:, line.lines.origin + 12].detach().numpy())


def test_a_table_that_is_switched_off_is_not_drawn(tmp_path: Path) -> None:
    transformers = imported("transformers")
    model = transformers.T5Model(
        transformers.T5Config(vocab_size=90, d_model=16, d_kv=4, num_heads=3, num_layers=2, d_ff=16)
    )
    relpos.replace_position(model.encoder, "relative_1d", init_std=0.5)
    found, left = stored_positions(kept(model.state_dict(), tmp_path), {})
    own = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert left == [(f"encoder.{own}", "it is not used: encoder.positions replace it")]
    assert [one.name.startswith("encoder.positions.") for one in found] == [True, True, False]
    assert found[2].name == f"decoder.{own}", "the decoder's own stays on"


def _encoder() -> Any:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 1, enable_nested_tensor=False)


def test_a_table_of_a_grid_in_a_model_that_says_nothing_of_its_tokens(tmp_path: Path) -> None:
    model = _encoder()
    relpos.replace_position(model, "relative_2d", coordinates=relpos.Grid(4, 4), init_std=0.5)
    (one,) = found_in(model, tmp_path)
    assert one.kind == "table of a sequence or a grid"
    assert "no name shows whether tokens are a sequence or a grid" in one.note
    _, maps = one.pictures
    assert isinstance(maps, Maps)
    dense = model.positions[0].mechanisms[0]().detach().numpy()
    for i, j, down, right in on_grid(4, 4):
        values = maps.values[:, int(down - maps.rows.first), int(right - maps.columns.first)]
        assert np.allclose(values, dense[:, i, j])


def test_a_table_of_a_sequence_in_a_model_that_says_nothing_of_its_tokens(tmp_path: Path) -> None:
    model = _encoder()
    relpos.replace_position(model, "relative_1d", coordinates=relpos.Sequence(12), init_std=0.5)
    (one,) = found_in(model, tmp_path)
    assert (one.kind, len(one.pictures)) == ("table of a sequence", 1)
    assert one.note == "Drawn for a sequence: no name shows whether tokens are a sequence or a grid."


@pytest.mark.parametrize("other", ["encoder.patch_embed.weight", "dispatch.weight", "decoder.lm_patch.weight"])
def test_a_text_decoder_beside_patches_keeps_its_table(other: str, tmp_path: Path) -> None:
    """Pix2Struct has an encoder of patches and T5's decoder."""
    table = "decoder.layer.0.self_attention.attention.relative_attention_bias.weight"
    state = {table: torch.randn(8, 2), "decoder.embed_tokens.weight": torch.zeros(3, 4), other: torch.zeros(2)}
    (one,), left = stored_positions(kept(state, tmp_path), {})
    assert (one.name, one.kind, left) == (table, "T5 buckets", [])


def test_buckets_of_patches_are_left_out(tmp_path: Path) -> None:
    state = {
        "image.positions.0.relative_attention_bias": torch.randn(8, 2), "image.patch_embed.weight": torch.zeros(3),
        "decoder.embed_tokens.weight": torch.zeros(3, 4),
    }  # fmt: skip
    found, ((_, reason),) = stored_positions(kept(state, tmp_path), {})
    assert (found, reason) == ([], "it does not determine distances on a grid")


def test_models_of_relpos(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = relpos.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2,
        position="learned+relative_2d", position_init_std=1.0,
    )  # fmt: skip
    assert [one.kind for one in found_in(model, tmp_path)] == ["table with a class token"] * 2


def test_what_is_left_out_says_why(tmp_path: Path) -> None:
    found, left = stored_positions(
        kept(
            {
                "a.relative_position_bias_table": torch.zeros(35, 2),
                "b.relative_position_bias_table": torch.full((9, 2), float("nan")),
                "c.rel_pos_h": torch.zeros(4, 2),
                "d.rel_embeddings.weight": torch.zeros(3, 2),
                "e.rel_embeddings": torch.zeros(4),
                "f.relative_attention_bias": torch.zeros(31, 2),
                "g.relative_attention_bias": torch.zeros(32, 2),
                "pos_embed": torch.zeros(4, 2),
            },
            tmp_path,
        ),
        {},
    )
    assert not found
    no_window = "its 35 rows fit no square window, and no relative_position_index is stored"
    assert dict(left) == {
        "a.relative_position_bias_table": no_window,
        "b.relative_position_bias_table": "it has values that are not finite",
        "c.rel_pos_h": "it has 4 rows, an even number",
        "d.rel_embeddings.weight": "it has 3 rows, an odd number",
        "e.rel_embeddings": "it has 1 axes, not 2",
        "f.relative_attention_bias": "no name shows whether it belongs to an encoder or a decoder",
        "g.relative_attention_bias": "no name shows whether it belongs to an encoder or a decoder",
    }
    _, ((_, reason),) = stored_positions(kept({"encoder.relative_attention_bias": torch.zeros(31, 2)}, tmp_path), {})
    assert "num_buckets" in reason


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = kept({"a.relative_position_bias_table": torch.zeros(9, 2), "big": torch.zeros(1000)}, tmp_path)
    read: list[str] = []
    right = StoredTensors.read
    monkeypatch.setattr(StoredTensors, "read", lambda self, name: read.append(name) or right(self, name))  # type: ignore[func-returns-value]
    stored_positions(tensors, {})
    assert read == ["a.relative_position_bias_table"]
