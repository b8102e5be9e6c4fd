"""The two test models: their architectures, the tokenizer that they share, and how a trained one is saved.

Every linear layer that is quantized reads 256, 512 or 768 inputs: groups of 32, 64 and 128 divide them, and so do the
rows of 256 that llama.cpp's K-quants want. Names and layout are DeepSeek-V2's (arXiv 2405.04434) and Llama's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS = "<|bos|>", "<|eos|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (BOS, EOS, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message.role) }}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(
        **_SHARED, intermediate_size=768, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True
    ),
    # two dense layers, not one, keep it near 8M parameters with experts of 256
    "deepseek-v2": transformers.DeepseekV2Config(
        **_SHARED,
        intermediate_size=512,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=256,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
    ),
}


def train_tokenizer(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of 4096 tokens, which splits text as GPT-2's does and puts a BOS in front."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer


def save(model: transformers.PreTrainedModel, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with weights in bf16; the model is left as it was."""
    half = type(model)(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.config.dtype = torch.bfloat16
    half.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    half.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
