"""Small models of transformers on ranks' shares of tokens, against the whole in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import relpos
from relpos.adapters.common.libraries import imported
from relpos.parallel import average_gradients, context_parallel, shard, unshard

N, VOCABULARY = 16, 13
SIZES: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    "Llama": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": N,
    },
    "Mpt": {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": N},
    "Bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 4},
    "GPT2": {
        "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": N, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "Bert": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": N, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    },
}  # fmt: skip
SIZES["UMT5"] = SIZES["MT5"] = SIZES["T5"]


def make(family: str, name: str, position: str | None = None, **more: Any) -> Any:
    """A small model in float64; its position is replaced where one is named, else retrofitted."""
    torch.manual_seed(4)
    library = imported("transformers")
    config = getattr(library, f"{family}Config")(vocab_size=VOCABULARY, **SIZES[family])
    model = getattr(library, family + name)(config, **more).double().train()
    if position is None:
        relpos.retrofit(model, verify=False, border=0)
    else:
        relpos.replace_position(model, position)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


CASES: dict[str, Callable[[], Any]] = {
    "t5": lambda: make("T5", "ForConditionalGeneration"),
    "mt5 encoder": lambda: make("MT5", "EncoderModel"),
    "umt5": lambda: make("UMT5", "Model"),
    "t5 encoder, replaced": lambda: make("T5", "EncoderModel", "alibi"),
    "mpt": lambda: make("Mpt", "ForCausalLM"),
    "bloom, unpadded": lambda: make("Bloom", "Model"),
    "llama, replaced": lambda: make("Llama", "ForCausalLM", "t5"),
    "llama, from states": lambda: make("Llama", "Model", "fox"),
    "llama, on tokens": lambda: make("Llama", "Model", "learned"),
    "gpt2, on tokens": lambda: make("GPT2", "LMHeadModel", "learned"),
    "bert, replaced": lambda: make("Bert", "ForMaskedLM", "shaw"),
}


def outputs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits or states by token."""
    out = model(**inputs)
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found


def compare(mesh: Any) -> Iterator[tuple[str, float]]:
    """By case: the largest difference of outputs and gradients from one process's."""
    torch.manual_seed(3)
    ids, own = torch.randint(VOCABULARY, (2, 2, N))
    valid = (torch.arange(N) < torch.tensor([[N - 3], [N]])).long()  # only in the last rank's share
    for at, (name, build) in enumerate(CASES.items()):
        layout = "zigzag" if at % 2 else "contiguous"
        model = build()
        inputs = (
            {"input_ids": ids}
            if "states" in name or "unpadded" in name
            else {"input_ids": ids, "attention_mask": valid}
        )
        if model.config.is_encoder_decoder and hasattr(model, "decoder"):
            inputs |= {"decoder_input_ids": own}
        whole = outputs(model, inputs)
        upstream = torch.randn_like(whole)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        wanted = torch.autograd.grad((whole * upstream).sum(), weights, allow_unused=True)
        context_parallel(model, mesh, layout=layout)
        out = outputs(model, {key: shard(x, mesh, layout=layout) for key, x in inputs.items()})
        (2 * out * shard(upstream, mesh, layout=layout)).sum().backward()
        average_gradients(model, mesh)
        pairs = [(x.grad, g) for x, g in zip(weights, wanted, strict=True) if g is not None]
        different = max(
            float((x - g).detach().abs().max())
            for x, g in [(unshard(out.detach(), mesh, layout=layout), whole), *pairs]
        )
        context_parallel(model, None)
        back = float((outputs(model, inputs) - whole).detach().abs().max())
        yield name, max(different, back)
