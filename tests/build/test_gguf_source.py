"""GGUF files: what comes out equals the model that was written in, and broken files fail with a message."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.build.gguf_source import GgufSource
from harness.errors import HarnessError, SourceError, UnsupportedModelError
from harness.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from harness.spec import GqaSpec
from harness.tokenizer import Tokenizer
from harness.weight_source import FloatArray

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 8, 32, 300
_LAYER = "model.layers.0."
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_norm": _LAYER + "input_layernorm",
    "blk.0.attn_q": _LAYER + "self_attn.q_proj",
    "blk.0.attn_k": _LAYER + "self_attn.k_proj",
    "blk.0.attn_v": _LAYER + "self_attn.v_proj",
    "blk.0.attn_output": _LAYER + "self_attn.o_proj",
    "blk.0.ffn_norm": _LAYER + "post_attention_layernorm",
    "blk.0.ffn_gate": _LAYER + "mlp.gate_proj",
    "blk.0.ffn_up": _LAYER + "mlp.up_proj",
    "blk.0.ffn_down": _LAYER + "mlp.down_proj",
}
BIASED = ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v")


def random_model(*, biases: bool) -> dict[str, FloatArray]:
    """A one-layer model under Hugging Face's names."""
    rng = np.random.default_rng(1)
    rows = {"token_embd": VOCAB, "blk.0.attn_k": KV_HEADS * HEAD_DIM, "blk.0.attn_v": KV_HEADS * HEAD_DIM}
    tensors = {}
    for name, hf_name in NAMES.items():
        shape = (HIDDEN,) if name.endswith("norm") else (rows.get(name, HIDDEN), HIDDEN)
        tensors[hf_name + ".weight"] = rng.standard_normal(shape, dtype=np.float32)
        if biases and name in BIASED:
            tensors[hf_name + ".bias"] = rng.standard_normal(shape[0], dtype=np.float32)
    return tensors


def permuted(tensor: FloatArray, num_heads: int) -> FloatArray:
    """Rows of q or k in the order of Llama's GGUF files: the halves of each head interleaved."""
    heads = tensor.reshape(num_heads, 2, HEAD_DIM // 2, -1)
    pairs = [heads[h, half, i] for h in range(num_heads) for i in range(HEAD_DIM // 2) for half in range(2)]
    return np.asarray(np.stack(pairs).reshape(tensor.shape))


def write_gguf(
    path: Path,
    model: dict[str, FloatArray],
    *,
    arch: str = "llama",
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    pre: str | None = "gpt-2",
    tensors: dict[str, FloatArray] | None = None,
) -> Path:
    """Write a model the way converters do. `extra` are further keys, by full name."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|endoftext|>", "<tool>", "[PAD2]", "a", "b", "ab", "<|im_end|>"])
    writer.add_token_types([3, 4, 5, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32 if isinstance(value, float) else None
        (add or writer.add_uint32)(key, value)
    gguf_names = {hf_name: name for name, hf_name in NAMES.items()}
    for hf_name, tensor in model.items():
        stem, kind = hf_name.rsplit(".", 1)
        name = gguf_names.get(stem, "output")
        if arch == "llama" and name in BIASED[:2]:
            tensor = permuted(tensor, HEADS if name.endswith("q") else KV_HEADS)
        if tensor.ndim == 2 and quant != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{name}.{kind}", gguf.quants.quantize(tensor, quant), raw_dtype=quant)
        else:
            writer.add_tensor(f"{name}.{kind}", tensor)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("arch", "biases"), [("llama", False), ("llama", True), ("qwen2", True)])
def test_names_order_and_values_come_back(tmp_path: Path, arch: str, biases: bool) -> None:
    model = random_model(biases=biases)
    source = GgufSource(write_gguf(tmp_path / "Tiny.F32.gguf", model, arch=arch))
    assert source.name == "Tiny.F32"
    assert source.names() == model.keys()
    for name, expected in model.items():
        assert source.shape(name) == expected.shape
        np.testing.assert_array_equal(source.read(name), expected)
        for rows in (slice(3, 13), slice(10, 999), slice(2, 2)):
            np.testing.assert_array_equal(source.read(name, rows), expected[rows])


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantized_rows_equal_the_librarys_own(tmp_path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    model = random_model(biases=False)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", model, quant=kind))
    for name, tensor in model.items():
        expected = tensor
        if tensor.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind).reshape(tensor.shape)
        np.testing.assert_array_equal(source.read(name), expected)
        np.testing.assert_array_equal(source.read(name, slice(5, 9)), expected[5:9])


def test_config_describes_the_model(tmp_path: Path) -> None:
    model = random_model(biases=False)
    tied = GgufSource(write_gguf(tmp_path / "tied.gguf", model)).spec
    assert tied.architecture == "LlamaForCausalLM"
    assert tied.attention == GqaSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    assert (tied.vocab_size, tied.max_position_embeddings, tied.num_layers) == (VOCAB, 2048, 1)
    assert tied.rms_norm_eps == pytest.approx(1e-6)
    assert tied.rope == RopeSpec(theta=50000.0, dim=HEAD_DIM)
    assert tied.tie_word_embeddings
    head = {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    untied = GgufSource(write_gguf(tmp_path / "untied.gguf", random_model(biases=True) | head, arch="qwen2"))
    assert untied.spec.architecture == "Qwen2ForCausalLM"
    assert not untied.spec.tie_word_embeddings
    np.testing.assert_array_equal(untied.read("lm_head.weight"), head["lm_head.weight"])


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scale_linear": 4.0}, LinearScaling(factor=4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 1024,
            },
            YarnScaling(factor=2.0, original_max_position_embeddings=1024),
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path: Path, extra: dict[str, Any], scaling: Any) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_model(biases=False), extra=extra))
    assert source.spec.rope.scaling == scaling


def test_llama3_rope_factors_are_recognized_or_refused(tmp_path: Path) -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    scaled = RopeSpec(theta=50000.0, dim=HEAD_DIM, scaling=scaling).inv_freq()
    factors = RopeSpec(theta=50000.0, dim=HEAD_DIM).inv_freq() / scaled
    model = random_model(biases=False)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors}))
    assert source.spec.rope.scaling == scaling
    assert source.names() == model.keys()
    factors[1] *= 1.5
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        GgufSource(write_gguf(tmp_path / "odd.gguf", model, tensors={"rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arch": "gemma3"}, "gemma3"),
        ({"extra": {"llama.expert_count": 8}}, "experts"),
        ({"extra": {"split.count": 2}}, "split"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"extra": {"llama.rope.dimension_count": 4}}, "part of a head"),
        ({"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "attn_sinks"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model(biases=False), **options)
    with pytest.raises(UnsupportedModelError, match=said):
        GgufSource(path)


@pytest.mark.parametrize("pre", [None, "tekken"])
def test_an_unknown_way_to_cut_text_is_refused(tmp_path: Path, pre: str | None) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_model(biases=False), pre=pre))
    with pytest.raises(UnsupportedModelError, match=f"{pre!r}"):
        _ = source.tokenizer


def test_kinds_of_tokens_and_ends_of_turns(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_model(biases=False)))
    assert source.generation_config == {"bos_token_id": 0, "eos_token_id": [0, 6]}
    tokenizer = Tokenizer(source.tokenizer, generation_config=source.generation_config)
    assert tokenizer.encode("ab<tool>b<|im_end|>") == [5, 1, 4, 6]
    assert tokenizer.special_ids == {0, 6}
    assert tokenizer.token_bytes(2) == b""  # an unused row of the embedding


# texts whose cut differs between the expressions, and the pieces that each must give
CUTS: dict[str, dict[str, list[str]]] = {
    "gpt-2": {"I'LL pay 1234!!\n": ["I", "'", "LL", " pay", " 1234", "!!", "\n"]},
    "smollm": {"pay 1234 you'll\n\n": ["pay", " ", "1", "2", "3", "4", " you", "'ll", "\n\n"]},
    "qwen2": {"I'LL pay 1234!!\n x": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "!!\n", " x"]},
    "deepseek-r1-qwen": {"a  b": ["a", " ", " b"]},
    "llama-bpe": {"pay 1234567\tok": ["pay", " ", "123", "456", "7", "\tok"]},
    "deepseek-coder": {"x = 12\n你好ok": ["x", " = ", "1", "2", "\n", "你好", "ok"]},
    "deepseek-llm": {"x = 12\n你好ok": ["x", " =", " ", "1", "2", "\n", "你好", "ok"]},
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(tmp_path: Path, pre: str) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_model(biases=False), pre=pre))
    cutter = tokenizers.Tokenizer.from_str(source.tokenizer.tokenizer_json.decode()).pre_tokenizer
    for text, pieces in CUTS[pre].items():
        spans = [span for _, span in cutter.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in spans] == pieces


def test_truncation_names_the_first_tensor_cut_off(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model(biases=False))
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(SourceError, match=r"m\.gguf is truncated.*blk\.0\.ffn_down\.weight"):
        GgufSource(path)
    for size in (0, 3, 10, 40, 700):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"m\.gguf"):
            GgufSource(path)


def test_corrupt_files_give_errors_of_ours(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model(biases=False))
    whole = path.read_bytes()
    choose = random.Random(11)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            damaged[choose.randrange(2000)] = choose.choice((0, 1, 0x7F, 0xFF, choose.randrange(256)))
        path.write_bytes(damaged)
        try:
            source = GgufSource(path)
            _ = source.spec, source.tokenizer, source.generation_config
        except HarnessError:
            pass


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf", random_model(biases=False))
    two = tmp_path / "two.gguf"
    two.write_bytes(one.read_bytes())
    assert GgufSource(one).fingerprint() == GgufSource(two).fingerprint()
    two.write_bytes(one.read_bytes()[:-1] + b"\x01")
    assert GgufSource(one).fingerprint() != GgufSource(two).fingerprint()


def test_smollm2_tokenizer(smollm2_path: Path) -> None:
    source = GgufSource(smollm2_path)
    tokenizer = Tokenizer(source.tokenizer, generation_config=source.generation_config)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Add 2024 and 17"}])
    pieces = [tokenizer.token_bytes(i).decode() for i in ids]
    assert pieces[:2] == ["<|im_start|>", "system"]
    assert "".join(pieces).endswith("Add 2024 and 17<|im_end|>\n<|im_start|>assistant\n")
    assert [piece for piece in pieces if piece.isdigit()] == list("202417")
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids) == (1, False, (2, 0))


def test_smollm2_weights_answer_in_transformers(smollm2_path: Path) -> None:
    # rows of q and k in the wrong order, or a wrong config, would make this babble
    source = GgufSource(smollm2_path)
    tokenizer = Tokenizer(source.tokenizer, generation_config=source.generation_config)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**source.config))
    state = {name: torch.from_numpy(source.read(name)) for name in source.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is in no checkpoint
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=2)[0].tolist()
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris."
