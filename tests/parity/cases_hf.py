"""Hugging Face models from small configurations: built offline, with random weights."""

from __future__ import annotations

import os
from typing import Any

import torch

from .harness import Observations, Start, case
from .models import images, sequences, tokens

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 10}

CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GROUPED),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        # Its grouped matrix product wants rows of whole 16-byte pieces.
        {
            **GROUPED,
            "hidden_size": 36,
            "intermediate_size": 44,
            "head_dim": 12,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 43, "word_embed_proj_dim": 30, "layerdrop": 0.2},
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 101, "hidden_size": 18, "state_size": 3, "num_hidden_layers": 4},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 101,
            "d_model": 30,
            "d_kv": 10,
            "d_ff": 43,
            "num_layers": 3,
            "num_heads": 3,
            "decoder_start_token_id": 0,
        },
    ),
}
GPT2 = {
    "vocab_size": 101,
    "n_embd": 39,
    "n_layer": 4,
    "n_head": 3,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _build(config: str, model: str, options: dict[str, Any]) -> Any:
    """A model of the library by the names of its classes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _train(
    start: Start, model: Any, autocast: bool = False, steps: int = 5, generate: bool = False
) -> Observations:
    """The loop of the library's own examples: labels in, loss out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(steps):
            model.train()
            ids = tokens(step)[0].contiguous()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, norm)
            model.eval()
            if generate:
                out = model.generate(ids[:, :3], max_new_tokens=4, do_sample=True)
            else:
                with torch.no_grad():
                    out = model(input_ids=ids, labels=ids).logits
            yield "eval", out


def _register_causal() -> None:
    for name, (config, model, options) in CAUSAL.items():

        @case(f"hf_{name}")
        def program(
            start: Start,
            config: str = config,
            model: str = model,
            options: dict[str, Any] = options,
        ) -> Observations:
            yield from _train(start, _build(config, model, options))


_register_causal()


@case("hf_gpt2")
def hf_gpt2(start: Start) -> Observations:
    """GPT-2 with tied weights, dropout, and sampling between the steps."""
    yield from _train(start, _build("GPT2Config", "GPT2LMHeadModel", GPT2), generate=True)


@case("hf_gpt2_autocast")
def hf_gpt2_autocast(start: Start) -> Observations:
    """GPT-2 under bf16 autocast."""
    yield from _train(start, _build("GPT2Config", "GPT2LMHeadModel", GPT2), autocast=True)


def _register_checkpointed() -> None:
    for use_reentrant in (True, False):

        @case(f"hf_llama_checkpoint_{'re' if use_reentrant else 'non_re'}entrant")
        def program(start: Start, use_reentrant: bool = use_reentrant) -> Observations:
            model = _build("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "use_cache": False})
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            yield from _train(start, model)


_register_checkpointed()


@case("hf_vit")
def hf_vit(start: Start) -> Observations:
    """ViT: a class token and positions as parameters of the root."""
    model = _build(
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 30,
            "intermediate_size": 43,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "image_size": 9,
            "patch_size": 3,
            "num_labels": 7,
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            loss = model(pixel_values=images(step), labels=torch.tensor([1, 5, 6])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("hf_wav2vec2")
def hf_wav2vec2(start: Start) -> Observations:
    """wav2vec 2.0: convolutions over sound, a weight-normed positional convolution, layer drop."""
    model = _build(
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        {
            "hidden_size": 30,
            "intermediate_size": 43,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "conv_dim": (13, 17),
            "conv_stride": (3, 2),
            "conv_kernel": (5, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 7,
            "num_conv_pos_embedding_groups": 3,
            "layerdrop": 0.2,
            "mask_time_prob": 0.0,
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            sound = sequences(step, 97, length=1)[:, 0]
            loss = model(sound).last_hidden_state.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
