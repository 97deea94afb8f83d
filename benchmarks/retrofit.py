"""Models of other libraries as published and retrofitted: how they agree, and time and memory at three sizes.

    python benchmarks/retrofit.py [--threads 2] [--rounds 5] [--only NAMES] [--agreement] [--device cuda]

Writes `benchmarks/results/retrofit-cpu.json`, or `retrofit-cuda.json`; with --only what is there for others stays.
It takes half an hour on two cores and wants them for itself. `scripts/retrofit_page` then writes docs/retrofit.md.
Weights are random, layers one, attention weights not dropped, unless a line says otherwise: what a layer costs is what
a model pays each layer. `retrofit_layers.py` has layers whose inputs are their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "adapters"))

from retrofit_layers import CASES  # noqa: E402
from wheels import WHEELS, importable  # noqa: E402

import relpos  # noqa: E402
from relpos.adapters.common.libraries import imported  # noqa: E402
from relpos.bench.retrofits import RetrofitTiming, compare_retrofit  # noqa: E402

RESULTS = Path(__file__).parent / "results"


def _transformers(config: str, model: str, **settings: Any) -> nn.Module:
    library = imported("transformers")
    made: nn.Module = getattr(library, model)(getattr(library, config)(**settings))
    return made


def _timm(name: str, **settings: Any) -> nn.Module:
    made: nn.Module = imported("timm").create_model(name, **settings)
    return made


_BERT = {"vocab_size": 1000, "num_hidden_layers": 1, "attention_probs_dropout_prob": 0.0}
SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "t5-small, encoder": (
        lambda: _transformers("T5Config", "T5EncoderModel", vocab_size=1000, num_layers=1, dropout_rate=0.0),
        (512, 2048, 4096),
    ),
    "t5-small, encoder, dropout 0.1": (
        lambda: _transformers("T5Config", "T5EncoderModel", vocab_size=1000, num_layers=1, dropout_rate=0.1),
        (512, 2048, 4096),
    ),
    "deberta-v2-base": (
        lambda: _transformers(
            "DebertaV2Config",
            "DebertaV2Model",
            **_BERT,
            hidden_size=768,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
        ),
        (512, 1024, 2048),
    ),
    "parakeet, 1024 wide": (
        lambda: _transformers(
            "ParakeetEncoderConfig",
            "ParakeetEncoder",
            hidden_size=1024,
            num_hidden_layers=1,
            num_attention_heads=8,
            intermediate_size=4096,
            attention_dropout=0.0,
            dropout=0.0,
        ),
        (3000, 12000, 24000),  # frames; the model attends among an eighth of them
    ),
    "bloom-560m": (
        lambda: _transformers("BloomConfig", "BloomModel", vocab_size=1000, hidden_size=1024, n_layer=1, n_head=16),
        (512, 1024, 2048),
    ),
    "mpnet-base": (
        lambda: _transformers("MPNetConfig", "MPNetModel", **_BERT, max_position_embeddings=2056),
        (256, 512, 2048),
    ),
    "layoutlmv3-base": (
        lambda: _transformers(
            "LayoutLMv3Config", "LayoutLMv3Model", **_BERT, visual_embed=False, max_position_embeddings=2056
        ),
        (512, 1024, 2048),
    ),
    "udop-base, encoder, 4 layers": (  # which published share one bias
        lambda: _transformers(
            "UdopConfig",
            "UdopEncoderModel",
            vocab_size=1000,
            d_model=768,
            d_ff=3072,
            num_heads=12,
            num_layers=4,
            dropout_rate=0.0,
            is_encoder_decoder=False,
        ),
        (512, 1024, 2048),
    ),
    "phi4 audio, 4 layers": (  # which published share one bias
        lambda: imported("transformers.models.phi4_multimodal").Phi4MultimodalAudioModel(
            imported("transformers").Phi4MultimodalAudioConfig(num_blocks=4, nemo_conv_channels=64)
        ),
        (1000, 2000, 4000),  # frames; the model attends among an eighth of them
    ),
    "falcon, 1024 wide": (
        lambda: _transformers(
            "FalconConfig",
            "FalconModel",
            vocab_size=1000,
            hidden_size=1024,
            num_hidden_layers=1,
            num_attention_heads=16,
            alibi=True,
            multi_query=False,
        ),
        (512, 1024, 2048),
    ),
    "mpt, 1024 wide": (
        lambda: _transformers("MptConfig", "MptModel", vocab_size=1000, d_model=1024, n_heads=16, n_layers=1),
        (512, 1024, 2048),
    ),
    "wav2vec2_conformer, 1024 wide": (
        lambda: _transformers(
            "Wav2Vec2ConformerConfig",
            "Wav2Vec2ConformerModel",
            num_hidden_layers=1,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=4096,
            position_embeddings_type="relative",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            mask_time_prob=0.0,
        ),
        (160_000, 320_000, 640_000),  # samples; the model attends among one of 320
    ),
    "wav2vec2_bert, 1024 wide": (
        lambda: _transformers(
            "Wav2Vec2BertConfig",
            "Wav2Vec2BertModel",
            num_hidden_layers=1,
            hidden_size=1024,
            attention_dropout=0.0,
            mask_time_prob=0.0,
        ),
        (512, 1024, 2048),
    ),
    "wavlm-base": (
        lambda: _transformers(
            "WavLMConfig",
            "WavLMModel",
            num_hidden_layers=1,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        (160_000, 320_000, 640_000),  # samples; the model attends among one of 320
    ),
    **{
        f"inkling, 1024 wide, {name}": (
            functools.partial(
                _transformers,
                "InklingTextConfig",
                "InklingTextModel",
                vocab_size=1000,
                hidden_size=1024,
                num_hidden_layers=1,
                layer_types=[kind],
                num_attention_heads=16,
                num_key_value_heads=4,
                head_dim=64,
                swa_num_attention_heads=16,
                swa_num_key_value_heads=4,
                swa_head_dim=64,
                mlp_layer_types=["dense"],
                intermediate_size=1024,
                use_cache=False,
            ),
            (512, 1024, 2048),
        )
        for name, kind in (("full", "hybrid"), ("sliding", "hybrid_sliding"))
    },
    "deepseek_v4, 1024 wide, sliding": (
        lambda: _transformers(
            "DeepseekV4Config",
            "DeepseekV4Model",
            vocab_size=1000,
            hidden_size=1024,
            moe_intermediate_size=1024,
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
            num_attention_heads=16,
            head_dim=128,
            qk_rope_head_dim=64,
            q_lora_rank=512,
            o_lora_rank=256,
            n_routed_experts=2,
            num_experts_per_tok=1,
            use_cache=False,
        ),
        (512, 1024, 2048),
    ),
    "layoutlmv3-base, dropout 0.1": (
        lambda: _transformers(
            "LayoutLMv3Config",
            "LayoutLMv3Model",
            vocab_size=1000,
            num_hidden_layers=1,
            visual_embed=False,
            max_position_embeddings=2056,
        ),
        (512, 1024, 2048),
    ),
}
"""Name to how a model is made, and lengths; images have the model's own size."""
_OF_IMAGES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "beit-base": (
        lambda pixels: _transformers(
            "BeitConfig", "BeitModel", num_hidden_layers=1, image_size=pixels, use_relative_position_bias=True
        ),
        (224, 384, 512),
    ),
    "timm vit_relpos_base_patch16": (
        lambda pixels: _timm("vit_relpos_base_patch16_224", depth=1, img_size=pixels),
        (224, 384, 512),
    ),
    "timm beit_base_patch16": (
        lambda pixels: _timm("beit_base_patch16_224", depth=1, img_size=pixels),
        (224, 384, 512),
    ),
    "timm swinv2_tiny, four windows a side": (
        lambda pixels: _timm("swinv2_tiny_window16_256", img_size=pixels, window_size=pixels // 16),
        (256, 384, 512),
    ),
}
SHAPES |= {
    f"{name}, {pixels} px": (functools.partial(build, pixels), ())
    for name, (build, sizes) in _OF_IMAGES.items()
    for pixels in sizes
}


def agreements() -> dict[str, list[dict[str, Any]]]:
    """How every model of the tests agrees: by name, the verdicts of its modules."""
    from models_toolkits import MODELS

    from models import models

    found = {}
    with importable():
        for name, model in {**models(), **{model.name: model for model in MODELS}}.items():
            print("verify", name, flush=True)
            report = relpos.retrofit(model.made(torch.float32), border=0)
            found[name] = [dataclasses.asdict(verdict) for verdict in report.verified]
    return found


def main() -> None:
    """Run what was asked for, and write it beside what was there."""
    parser = argparse.ArgumentParser(description="models as published and retrofitted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=None, help="names of shapes, separated by semicolons")
    parser.add_argument("--agreement", action="store_true", help="also verify the models of the tests")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    file = RESULTS / f"retrofit-{asked.device}.json"
    result = json.loads(file.read_text("utf-8")) if file.exists() else {"timings": {}, "agreement": {}}
    result["versions"] = {
        "torch": torch.__version__,
        "transformers": imported("transformers").__version__,
        "timm": imported("timm").__version__,
        "torchvision": imported("torchvision").__version__.partition("+")[0],
        "monai": metadata.version("monai"),
        "python": platform.python_version(),
    } | {wheel.package: wheel.requirement.partition("==")[2] for wheel in WHEELS}
    wanted = [*SHAPES, *CASES] if asked.only is None else [name for name in asked.only.split(";") if name]
    with importable() if CASES.keys() & set(wanted) else nullcontext():
        for name in wanted:
            rows: dict[str, Any] = {"on": f"{asked.threads} threads, {_processor(asked.device)}"}
            for train in (True, False):
                timings = _timed(name, train, asked.rounds, asked.device)
                rows["train" if train else "forward"] = [dataclasses.asdict(one) for one in timings]
                for one in timings:
                    print(f"{name:32} {'step' if train else 'forward':8} {one}", flush=True)
            result["timings"][name] = rows
            file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if asked.agreement:
        result["agreement"] = agreements()
    file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def _timed(name: str, train: bool, rounds: int, device: str) -> list[RetrofitTiming]:
    """The timings of a shape, or of a layer with inputs of its own."""
    torch.manual_seed(0)
    if name in SHAPES:
        build, lengths = SHAPES[name]
        return compare_retrofit(build().to(device), lengths, train=train, rounds=rounds)[1]
    one = CASES[name]

    def inputs(length: int | None) -> dict[str, Any]:
        return {key: x.to(device) for key, x in one.inputs(length).items()}

    model = one.build().to(device)
    return compare_retrofit(model, one.lengths, train=train, rounds=rounds, border=one.border, inputs=inputs)[1]


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
