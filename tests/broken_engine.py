"""Engines broken on purpose, by changing what they store; imported by tests of quality reports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from harness.manifest import describe_files, parse_weights_node_name, read_manifest, write_manifest
from harness.runtime.openvino_core import openvino_core
from harness.tokenizer import Tokenizer

Scales = npt.NDArray[np.float16]


def break_scales(engine: Path, out: Path, module: str, edit: Callable[[Scales, int], Scales]) -> Path:
    """A copy of an engine in which the scales of the matrix that holds `module` are what `edit` returns.

    `edit` gets the scales `(.., out, groups, 1)` or `(.., out, 1)` and the number of the module in the matrix.
    """
    shutil.copytree(engine, out)
    model = openvino_core().read_model(engine / "model.xml")
    named = ((node, parse_weights_node_name(node.get_friendly_name())) for node in model.get_ordered_ops())
    holding = [(node, modules) for node, modules in named if modules is not None and module in modules]
    assert holding, f"the engine has no {module}"
    for node, modules in holding:
        multiply = _multiply(node)
        scale = multiply.input_value(1).get_node()
        edited = edit(np.array(scale.get_data()), list(modules).index(module))
        multiply.input(1).replace_source_output(ov.opset13.constant(edited).output(0))
    for name in ("model.xml", "model.bin"):
        (out / name).unlink()
    ov.save_model(model, out / "model.xml", compress_to_fp16=False)
    return _sealed(out)


def change_chat_template(engine: Path, out: Path, template: str) -> Path:
    """A copy of an engine with another chat template."""
    shutil.copytree(engine, out)
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    return _sealed(out)


def _sealed(out: Path) -> Path:
    """Manifest and hashes as a builder with that fault would have written them."""
    shutil.rmtree(out / "quality", ignore_errors=True)
    manifest = read_manifest(out)
    tokenizer = manifest.tokenizer.model_copy(
        update={"chat_template_sha256": Tokenizer.from_dir(out).chat_template_sha256}
    )
    files = {name: part for name, part in describe_files(out).items() if name != "manifest.json"}
    write_manifest(
        out,
        manifest.model_copy(update={"files": files, "tokenizer": tokenizer, "engine_id": "b" + manifest.engine_id[1:]}),
    )
    return out


def _multiply(node: Any) -> Any:
    while node.get_type_name() != "Multiply":
        node = node.input_value(0).get_node()
    return node
