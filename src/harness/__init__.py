"""The shared core of DeepSeek Harness: what both the builder and the runtime must agree on.

It owns the arch table, the error tree, the typed model description, the quantization recipe, the engine
manifest, the tokenizer and the memory ledger. Nothing here runs a model.
"""

__version__ = "0.1.0"
