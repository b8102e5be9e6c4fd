"""A program in the place of `trtllm-build` 1.2.1: takes its flags and no others, writes what it would, but no engine.

The flags are those of `tensorrt_llm/commands/build.py` and of the plugin options that it adds. What it switches off,
`tensorrt_llm/builder.py` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NUMBERS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_beam_width",
    "max_num_tokens",
    "max_draft_len",
    "workers",
)
SWITCHES = (
    "remove_input_padding",
    "context_fmha",
    "use_paged_context_fmha",
    "multiple_profiles",
)
PLUGINS = ("gpt_attention_plugin", "gemm_plugin")
DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--tokens_per_block", type=int, default=32)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", choices=("enable", "disable"), default="enable")
    for name in PLUGINS:
        parser.add_argument(f"--{name}", choices=DTYPES)
    parser.add_argument("--kv_cache_type", choices=("continuous", "paged", "disabled"))
    parser.add_argument("--log_level", choices=("internal_error", "error", "warning", "info", "verbose"))
    parser.add_argument("--speculative_decoding_mode", choices=("lookahead_decoding", "medusa", "eagle"))
    parser.add_argument("--gather_context_logits", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    config: dict[str, Any] = json.loads((given.checkpoint_dir / "config.json").read_text("utf-8"))
    paged = given.use_paged_context_fmha == "enable"
    if paged and config["quantization"]["kv_cache_quant_algo"] == "INT8":
        paged = False
        print("[W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.")
    print("[W] Overriding paged_state to False", file=sys.stderr)
    built = {name: getattr(given, name) for name in (*NUMBERS, "gather_context_logits")}
    if given.speculative_decoding_mode:
        built["max_seq_len"] += given.max_draft_len
        built["max_num_tokens"] = max(built["max_num_tokens"], given.max_batch_size * (given.max_draft_len + 1))
    built["plugin_config"] = {"use_paged_context_fmha": paged, "tokens_per_block": given.tokens_per_block}
    for rank in range(config["mapping"]["world_size"]):
        weights = given.checkpoint_dir / f"rank{rank}.safetensors"
        (given.output_dir / f"rank{rank}.engine").write_bytes(b"engine of " + weights.read_bytes()[:64])
    written = {"version": "1.2.1", "pretrained_config": config, "build_config": built}
    (given.output_dir / "config.json").write_text(json.dumps(written), encoding="utf-8")
    print("[I] Total time of building all engines: 00:00:01")


main()
