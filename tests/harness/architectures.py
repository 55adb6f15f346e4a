# SPDX-License-Identifier: Apache-2.0
"""Architectures: transformers' own classes, tiny, on the meta device where that is possible.

Sizes differ wherever a model lets them, so that a wrong axis or a wrong count shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

_DECODER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {**_DECODER, "moe_intermediate_size": 12, "num_experts_per_tok": 2}


def causal(config: Any) -> nn.Module:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


def deepseek_v3() -> nn.Module:
    return causal(
        hf.DeepseekV3Config(
            **_MOE,
            q_lora_rank=16,
            kv_lora_rank=20,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            n_routed_experts=3,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        )
    )


def qwen3_next() -> nn.Module:
    return causal(
        hf.Qwen3NextConfig(
            **_MOE,
            head_dim=16,
            num_experts=3,
            shared_expert_intermediate_size=10,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=6,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )
    )


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 44}
    return causal(hf.GPT2Config(vocab_size=61, n_positions=16, add_cross_attention=True, **sizes))


def falcon(**kind: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return causal(hf.FalconConfig(vocab_size=61, num_kv_heads=2, **sizes, **kind))


def bigcode(multi_query: bool) -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    return causal(hf.GPTBigCodeConfig(vocab_size=61, multi_query=multi_query, **sizes))


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
    config = hf.ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8, num_labels=5)
    with torch.device("meta"):
        return hf.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=61,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=44,
        decoder_ffn_dim=44,
        num_mel_bins=10,
        max_source_positions=12,
        max_target_positions=14,
        pad_token_id=0,
    )
    return hf.WhisperForConditionalGeneration(config)


def mamba2() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 6, "head_dim": 8}
    return causal(hf.Mamba2Config(vocab_size=61, num_heads=8, n_groups=2, expand=2, **sizes))


def vision_language(*, frozen_tower: bool) -> nn.Module:
    """Qwen2-VL: a tower with fused qkv and a decoder with separate projections."""
    vision = {
        "depth": 1,
        "embed_dim": 24,
        "hidden_size": 32,
        "num_heads": 3,
        "in_channels": 3,
        "patch_size": 4,
    }
    text = {**_DECODER, "num_hidden_layers": 1}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = hf.Qwen2VLForConditionalGeneration(config)
    if frozen_tower:
        model.model.visual.requires_grad_(False)
    return model


def llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=3,
        image_size=16,
        patch_size=8,
        projection_dim=24,
    )
    text = hf.LlamaConfig(**{**_DECODER, "num_hidden_layers": 1})
    with torch.device("meta"):
        return hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(vision_config=vision, text_config=text)
        )


def with_lora() -> nn.Module:
    """PEFT's own model: factors on two projections, the head trained whole, a norm as well."""
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "up_proj"]
    )
    return peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)), config)


def compiled() -> nn.Module:
    return torch.compile(hf.Phi3ForCausalLM(hf.Phi3Config(**_DECODER)))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: causal(hf.LlamaConfig(**_DECODER)),
    "qwen2_tied": lambda: causal(hf.Qwen2Config(**_DECODER, tie_word_embeddings=True)),
    "qwen3": lambda: causal(hf.Qwen3Config(**_DECODER, head_dim=12)),
    "gemma3": lambda: causal(hf.Gemma3TextConfig(**_DECODER, head_dim=12)),
    "cohere_qk_norm": lambda: causal(hf.CohereConfig(**_DECODER, use_qk_norm=True)),
    "phi3": lambda: causal(hf.Phi3Config(**_DECODER)),
    "qwen3_moe": lambda: causal(hf.Qwen3MoeConfig(**_MOE, head_dim=12, num_experts=3)),
    "mixtral": lambda: causal(hf.MixtralConfig(**_DECODER, num_local_experts=3)),
    "gpt_oss": lambda: causal(
        hf.GptOssConfig(**_DECODER, head_dim=12, num_local_experts=3, num_experts_per_tok=2)
    ),
    "llama4": lambda: causal(
        hf.Llama4TextConfig(**_DECODER, intermediate_size_mlp=20, num_local_experts=3)
    ),
    "granite_moe_shared": lambda: causal(
        hf.GraniteMoeSharedConfig(
            **_DECODER, num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=20
        )
    ),
    "jetmoe": lambda: causal(
        hf.JetMoeConfig(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=1,
            num_key_value_heads=2,
            kv_channels=8,
            intermediate_size=20,
            num_local_experts=3,
            num_experts_per_tok=2,
        )
    ),
    "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next,
    "gpt2": gpt2,
    "gpt_neox": lambda: causal(
        hf.GPTNeoXConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    ),
    "bloom": lambda: causal(hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)),
    "falcon_new": lambda: falcon(new_decoder_architecture=True),
    "falcon_multi_query": lambda: falcon(new_decoder_architecture=False, multi_query=True),
    "bigcode_multi_query": lambda: bigcode(True),
    "bigcode": lambda: bigcode(False),
    "vit": vit,
    "whisper": whisper,
    "mamba": lambda: causal(
        hf.MambaConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=6, time_step_rank=5
        )
    ),
    "mamba2": mamba2,
    "vlm_frozen_tower": lambda: vision_language(frozen_tower=True),
    "vlm": lambda: vision_language(frozen_tower=False),
    "llava": llava,
    "compiled_phi3": compiled,
}
