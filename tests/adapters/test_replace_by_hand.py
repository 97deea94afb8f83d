"""`replace_position`: models are what their mechanisms make of them by hand, and are put back bit for bit."""

import copy
import pickle

import pytest
import torch
from by_hand import gradients, require_same
from replaced_models import ALL, FAMILIES, gpt2, hf_vit
from torch import Tensor, nn

import relpos
from models import padding, tokens
from relpos.adapters.common.libraries import imported

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 4  # of each of its tests, in the fast part
ONE_A_LAYER = {
    "timm ViT": ["relative_2d", "rotary_2d+learned", "sinusoidal_2d", "rotary_mixed", "deberta", "none"],
    "DeiT": ["relative_2d+learned"],
    "ViT, registers": ["rotary_2d+learned", "relative_2d"],
    "ViT, no class token": ["relative_2d+learned"],
    "ViT": ["relative_2d", "t5", "alibi", "decomposed", "tupe", "none"],
    "ViT, eager": ["rotary_2d+learned"],
    "BEiT": ["rotary_2d", "none"],
    "BEiT, embedded": ["relative_2d", "none"],
    "BEiT, no position": ["learned+t5", "none"],
    "Swin": ["relative_2d", "rotary_2d", "log_cpb", "none"],
    "BERT": ["relative_1d+learned", "rotary_1d", "none"],
    "BERT, eager": ["relative_1d+learned", "none"],
    "GPT-2": ["relative_1d+learned", "rotary_1d", "none"],
    "GPT-2, eager": ["relative_1d+learned"],
    "Llama": ["relative_1d+learned", "rotary_1d", "none"],
    "Llama, eager": ["relative_1d+learned"],
    "T5": ["relative_1d", "sinusoidal_1d", "none"],
    "T5, eager": ["alibi"],
    "PyTorch": ["relative_1d", "rotary_1d", "none"],
    "PyTorch, norm first": ["t5"],
    "PyTorch, layers alone": ["relative_1d", "rotary_1d", "none"],
}
SHARED = {
    "timm ViT": ["rotary_mixed"],
    "ViT": ["decomposed"],
    "Swin": ["relative_2d"],
    "BERT": ["t5", "deberta"],
    "GPT-2": ["sinusoidal_1d", "transformer_xl"],
    "Llama": ["alibi", "deberta"],
    "T5": ["rotary_1d+learned"],
    "T5, eager": ["relative_1d"],
    "PyTorch, on a grid": ["learned+relative_2d"],
    "PyTorch, on a grid, training": ["learned+relative_2d"],
}


@pytest.mark.parametrize(
    ("name", "position", "shared"),
    [
        (name, position, shared)
        for shared, cases in ((False, ONE_A_LAYER), (True, SHARED))
        for name, positions in cases.items()
        for position in positions
    ],
)
def test_it_is_the_model_by_hand(name: str, position: str, shared: bool) -> None:
    family = ALL[name]
    model = family.published()
    before = family.features(model)
    relpos.replace_position(model, position, init_std=0.5, shared=shared, **family.options)
    counts = [len(x.positions) for x in model.modules() if "positions" in x._modules]
    assert counts == [1 if shared else layers for layers in family.layers]
    out = family.features(model)
    assert torch.allclose(out, before) == (position == "none" and not family.knows)
    require_same(model, out, family.expected(model, family.inputs()))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.own is not None])
def test_a_mechanism_that_says_what_the_model_knew_changes_nothing(name: str) -> None:
    """Rotations of transformers are float32."""
    family = FAMILIES[name]
    limit = 1e-6 if name == "Llama" else 1e-9
    wanted = family.features(family.published())
    torch.testing.assert_close(family.features(family.same()), wanted, rtol=limit, atol=limit)
    assert not torch.allclose(family.features(family.replaced()), wanted, rtol=1e-3, atol=1e-6)


def test_cross_attention_of_gpt2_stays_the_published_one() -> None:
    model = gpt2(add_cross_attention=True)
    others = {"encoder_hidden_states": torch.randn(3, 5, 32).double(), "encoder_attention_mask": padding(3, 5)}

    def decoded() -> Tensor:
        out: Tensor = model(tokens(3, 12), **others).logits
        return out

    own = decoded()
    relpos.replace_position(model, "learned")
    assert not torch.allclose(decoded(), own)
    model.transformer.positions[0].mechanisms[0].pos_embed.data.copy_(model.transformer.wpe.weight)
    torch.testing.assert_close(decoded(), own, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *((name, False) for name in (*FAMILIES, "BEiT, embedded", "T5, eager", "PyTorch, layers alone")),
        *((name, True) for name in ("timm ViT", "Swin", "T5")),
    ],
)
def test_a_model_is_saved_copied_and_put_back(name: str, shared: bool) -> None:
    family = ALL[name]
    model = family.published()
    before, state = family.called(model), {key: x.clone() for key, x in model.state_dict().items()}
    trained = [key for key, x in model.named_parameters() if x.requires_grad]
    idle = set(trained) - gradients(before, model).keys()  # a head that the call leaves out
    options = {"shared": shared, **family.options}
    report = relpos.replace_position(model, family.position, init_std=0.5, **options)
    assert "off" in str(report)
    replaced = family.called(model)
    assert not torch.allclose(replaced, before)
    unused = {key for key, x in model.named_parameters() if x.requires_grad} - gradients(replaced, model).keys()
    assert unused == idle, f"{unused - idle} would stop DistributedDataParallel"

    fresh = family.published()
    torch.manual_seed(7)
    relpos.replace_position(fresh, family.position, **options)
    assert not torch.allclose(family.called(fresh), replaced)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(family.called(fresh), replaced)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(family.called(other), replaced)
        _move_positions(other)
        assert not torch.allclose(family.called(other), replaced)
        assert torch.equal(family.called(model), replaced), "a copy has mechanisms of its own"
        relpos.restore(other)
        assert torch.equal(family.called(other), before)

    relpos.restore(model)
    assert torch.equal(family.called(model), before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert [key for key, x in model.named_parameters() if x.requires_grad] == trained
    relpos.replace_position(model, family.position, **options)  # a second time, after restore


@torch.no_grad()
def _move_positions(model: nn.Module) -> None:
    for name, x in model.named_parameters():
        if "positions." in name:
            x.add_(torch.randn_like(x))


def test_tables_that_start_as_nothing() -> None:
    """At init_std=0 a model computes what it would without position, and learns from there."""
    family = FAMILIES["timm ViT"]
    bag = family.published()
    relpos.replace_position(bag, None)
    wanted = family.features(bag)
    for name in ("relative_2d", "learned", "t5", "clipped", "factored_2d", "decomposed", "shaw"):
        model = family.published()
        relpos.replace_position(model, name)
        out = family.features(model)
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        out.square().sum().backward()
        assert any(bool(x.grad.any()) for x in model.positions.parameters() if x.grad is not None), name


TABLES = "layers.0.blocks.*.attn.relative_position_bias_table"
BUCKETS = "block.0.layer.0.SelfAttention.relative_attention_bias"
REPORTS: dict[str, tuple[list[str], list[str]]] = {
    "timm ViT": (
        ["pos_embed"],
        [
            "off       pos_embed: absolute embedding of 7 positions",
            "relative_2d, one per layer: 2 layers of the model itself, Grid(2, 3, prefix=1)",
        ],
    ),
    "BEiT, embedded": (
        ["pos_embed", "rel_pos_bias.relative_position_bias_table", "blocks.*.attn.relative_position_bias_table"],
        [],
    ),
    "BEiT, no position": ([], []),
    "Swin": (
        [TABLES, TABLES.replace("layers.0", "layers.1")],
        [f"{TABLES}: tables of 35 offsets, 2 layers", "2 layers of layers.0, Grid(4, 3)"],
    ),
    "BERT": (
        ["embeddings.position_embeddings"],
        ["off       embeddings.position_embeddings: absolute embedding of 32 positions", "texts of at most 32 tokens"],
    ),
    "GPT-2": (
        ["transformer.wpe"],
        ["off       transformer.wpe: absolute embedding of 32 positions", "texts of at most 32 tokens"],
    ),
    "Llama": (
        ["model.rotary_emb"],
        ["off       model.rotary_emb: rotation of queries and keys, default, base 10000", "texts of at most 32 tokens"],
    ),
    "T5": ([f"encoder.{BUCKETS}", f"decoder.{BUCKETS}"], []),
    "PyTorch, layers alone": ([], []),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_report_names_what_is_off(name: str) -> None:
    family, (own, lines) = ALL[name], REPORTS[name]
    position = "relative_2d" if "relative_2d" in family.position else "relative_1d"
    report = relpos.replace_position(family.published(), position, **family.options)
    assert [one.name for one in report.own] == own
    assert all(line in str(report) for line in lines)


def test_the_report_of_a_part_and_of_another_name() -> None:
    classifier = imported("transformers").ViTForImageClassification(hf_vit().config)
    report = relpos.replace_position(
        classifier, lambda site: relpos.RotaryEmbedding(site.head_dim, axes=2), shared=True
    )
    assert [one.name for one in report.own] == ["vit.embeddings.position_embeddings"]
    assert "a mechanism of your own, one for all: 2 layers of vit" in str(report)
    assert relpos.replace_position(FAMILIES["timm ViT"].published(), "rope").position == "rotary_2d"


@pytest.mark.parametrize(
    ("name", "kept"), [("timm ViT", "pos_embed: "), ("PyTorch", "nothing: the model has no position of its own")]
)
def test_own_keeps_what_the_model_has(name: str, kept: str) -> None:
    family = FAMILIES[name]
    model = family.published()
    before = family.called(model)
    report = relpos.replace_position(model, "own", **family.options)
    assert report.kept
    _, position, last = str(report).splitlines()
    assert position == "  position  own: the model keeps its own position; nothing was changed"
    assert last.startswith(f"  kept      {kept}")
    assert torch.equal(family.called(model), before)
    assert not hasattr(model, "positions")
