"""A build holds one matrix at a time, not the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.tokenizer import TokenizerFiles

# Builds 16 layers in f16 and prints the bytes of the largest matrix, of model.bin, and of the anonymous memory that the
# build took at most. The weights are made on the fly, so that what is measured is the builder's own; they
# differ from tensor to tensor, because equal constants are saved once.
BUILD = """
import sys, threading, time, zlib
from pathlib import Path
import numpy as np
import psutil
from harness.build.cpu_engine import build_cpu_engine
from harness.build.weight_check import expected_shapes
from harness.recipe import preset
from harness.spec import ModelSpec
from harness.tokenizer import TokenizerFiles

HIDDEN, INNER = 1024, 3072

class Source:
    name, config, generation_config = "m", {}, {}
    spec = ModelSpec.from_hf_config({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "vocab_size": 320, "max_position_embeddings": 128, "num_attention_heads": 8,
    })
    tokenizer = TokenizerFiles(
        tokenizer_json=Path(sys.argv[1]).read_bytes(), chat_template=None, special_tokens={"eos_token": "<eos>"}
    )
    shapes = expected_shapes(spec)
    def names(self): return frozenset(self.shapes)
    def shape(self, name): return self.shapes[name]
    def fingerprint(self): return "0" * 64
    def read(self, name, rows=None):
        start, stop, _ = (rows or slice(None)).indices(self.shapes[name][0])
        return np.full((stop - start, *self.shapes[name][1:]), zlib.crc32(name.encode()) % 1000 / 1000, np.float32)

process, peak = psutil.Process(), 0

def sample(*_):
    global peak
    memory = process.memory_info()
    peak = max(peak, memory.rss - memory.shared)

def keep_sampling():
    while True:
        sample()
        time.sleep(0.01)

source = Source()
sample()
before = peak
threading.Thread(target=keep_sampling, daemon=True).start()
engine = build_cpu_engine(source, preset("f16", source.spec), engines_dir=Path(sys.argv[2]), on_layer=sample).engine_dir
print(2 * 2 * INNER * HIDDEN, (engine / "model.bin").stat().st_size, peak - before)
"""


def test_memory_follows_the_largest_matrix_not_the_model(
    tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(make_tokenizer().tokenizer_json)
    command = [sys.executable, "-c", BUILD, str(tokenizer), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    matrix, model, anonymous = map(int, done.stdout.split())
    limit = 4 * matrix + (96 << 20)
    assert model > 2 * limit, "the model is too small to tell"
    assert anonymous < limit
