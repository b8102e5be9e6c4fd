"""The tensors of one rank of a TensorRT-LLM checkpoint: names, shapes, and the rows of the source they are made of.

Integers of a quantized checkpoint are stored as they are, in another layout; those of an unquantized source are rounded
to nearest. Everything is read and written some rows at a time. What is quantized stands in `weight` and
`weights_scaling_factor`; a `prequant_scaling_factor` of ones says that no input channel is rescaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.lowering.quantize import QuantizedRows, quantize_rows, unpack_nibbles
from harness.build.safetensors_writer import StreamedTensor, bfloat16_bits
from harness.build.tensorrt_llm.linears import FusedLinear, layer_linears
from harness.build.tensorrt_llm.plan import Plan
from harness.build.tensorrt_llm.tensors import pack_row_pairs
from harness.errors import BuildError
from harness.recipe import Precision
from harness.weight_source import FloatArray, WeightSource

_CHUNK_VALUES = 4 << 20
_DTYPES = {"float16": "F16", "bfloat16": "BF16"}
_HALF_MAX = float(np.finfo(np.float16).max)


class RankWeights:
    """Makes the tensors of one rank.

    Args:
        source: where the weights are.
        plan: what becomes of them.
        tp_rank: which share of each layer.
    """

    def __init__(self, source: WeightSource, plan: Plan, tp_rank: int) -> None:
        self._source = source
        self._plan = plan
        self._tp_rank = tp_rank
        self._dtype = _DTYPES[plan.dtype]

    def layer(self, layer: int, prefix: str) -> list[StreamedTensor]:
        """All of one decoder layer of a Llama or Qwen2; `prefix` is its name on the rank."""
        tensors = self.norms(layer, prefix)
        for linear in layer_linears(self._plan.spec, layer):
            tensors += self._linear(linear, f"{prefix}.{linear.name}")
        if layer in self._plan.kv_scales:
            name = f"{prefix}.attention.kv_cache_scaling_factor"
            tensors.append(_constant(name, "F32", np.array([self._plan.kv_scales[layer]], np.float32)))
        return tensors

    def norms(self, layer: int, prefix: str) -> list[StreamedTensor]:
        """The two norms of a decoder layer."""
        names = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
        return [
            self.whole(f"{prefix}.{name}.weight", f"model.layers.{layer}.{module}.weight")
            for name, module in names.items()
        ]

    def embedding(self) -> StreamedTensor:
        """A rank's rows of the embedding."""
        return self._vocab_rows("transformer.vocab_embedding.weight", "model.embed_tokens.weight")

    def head(self) -> list[StreamedTensor]:
        """The last norm and a rank's rows of the output matrix, which is written out where it is the embedding."""
        tied = self._plan.spec.tie_word_embeddings
        output = self._vocab_rows("lm_head.weight", "model.embed_tokens.weight" if tied else "lm_head.weight")
        return [self.whole("transformer.ln_f.weight", "model.norm.weight"), output]

    def whole(self, name: str, tensor: str) -> StreamedTensor:
        """A tensor that every rank has whole, in 16 bits."""
        shape = self._source.shape(tensor)
        return self.in_16_bits(name, shape, lambda: iter([self._source.read(tensor)]), tensor)

    def stacked(self, name: str, parts: list[tuple[str, slice]], columns: slice) -> StreamedTensor:
        """Rows of several tensors, and some of their columns, in 16 bits."""
        shape = sum(rows.stop - rows.start for _, rows in parts), columns.stop - columns.start

        def read() -> Iterator[FloatArray]:
            for tensor, rows in parts:
                for chunk in _chunks(rows, self._source.shape(tensor)[1]):
                    yield self._source.read(tensor, chunk)[:, columns]

        return self.in_16_bits(name, shape, read, parts[0][0])

    def in_16_bits(
        self, name: str, shape: tuple[int, ...], read: Callable[[], Iterator[FloatArray]], tensor: str
    ) -> StreamedTensor:
        """A tensor of the checkpoint's 16-bit dtype; `tensor` is what a fault in it is called."""

        def chunks() -> Iterator[npt.NDArray[np.uint16] | npt.NDArray[np.float16]]:
            for values in read():
                yield self._cast(np.ascontiguousarray(values), tensor)

        return StreamedTensor(name=name, dtype=self._dtype, shape=shape, chunks=chunks)

    def _cast(self, values: FloatArray, tensor: str) -> npt.NDArray[np.uint16] | npt.NDArray[np.float16]:
        if not np.isfinite(values).all():
            raise BuildError(f"{tensor} has a NaN or infinite value", "take the weights from their release again")
        if self._dtype == "BF16":
            return bfloat16_bits(values)
        if np.abs(values).max(initial=0) > _HALF_MAX:
            raise BuildError(
                f"{tensor} has a value too large for float16",
                'set "torch_dtype": "bfloat16" in config.json, if the model was trained in it',
            )
        return values.astype(np.float16)

    def _vocab_rows(self, name: str, tensor: str) -> StreamedTensor:
        vocab, hidden = self._source.shape(tensor)
        share = self._plan.ranks.share(vocab, self._tp_rank)
        start, stop = min(share.start, vocab), min(share.stop, vocab)

        def read() -> Iterator[FloatArray]:
            for chunk in _chunks(slice(start, stop), hidden):
                yield self._source.read(tensor, chunk)
            yield np.zeros((share.stop - share.start - (stop - start), hidden), np.float32)

        return self.in_16_bits(name, (share.stop - share.start, hidden), read, tensor)

    def _linear(self, linear: FusedLinear, name: str) -> list[StreamedTensor]:
        ranks, precision = self._plan.ranks, self._plan.precisions[linear.first]
        rows, columns = linear.rows(ranks, self._tp_rank), linear.columns(ranks, self._tp_rank)
        tensors = []
        if precision.dtype == "f16":
            tensors.append(self.stacked(f"{name}.weight", [(f"{m}.weight", part) for m, part in rows], columns))
        else:
            tensors += self._quantized(linear, name, precision)
        if linear.bias:
            tensors.append(self._bias(f"{name}.bias", rows))
        return tensors

    def _bias(self, name: str, rows: list[tuple[str, slice]]) -> StreamedTensor:
        size = sum(part.stop - part.start for _, part in rows)

        def read() -> Iterator[FloatArray]:
            for module, part in rows:
                yield self._source.read(f"{module}.bias", part)

        return self.in_16_bits(name, (size,), read, f"{rows[0][0]}.bias")

    def _quantized(self, linear: FusedLinear, name: str, precision: Precision) -> list[StreamedTensor]:
        out, inner = linear.rank_shape(self._plan.ranks, self._tp_rank)
        int4 = precision.dtype == "int4"
        scales: list[npt.NDArray[np.float32]] = []  # filled while the weight is written, which comes first

        def weight() -> Iterator[npt.NDArray[np.uint8] | npt.NDArray[np.int8]]:
            scales.clear()
            for integers, scale in self._integers(linear, precision):
                scales.append(scale)
                yield pack_row_pairs(integers) if int4 else integers

        def scale() -> Iterator[npt.NDArray[np.float32]]:
            for part in scales:
                yield part if int4 else part[:, 0]

        ones = self._cast(np.ones(inner, np.float32), name)
        group = precision.group_size or inner
        tensors = [
            StreamedTensor(name=f"{name}.weight", dtype="I8", shape=(out // 2 if int4 else out, inner), chunks=weight),
            StreamedTensor(
                name=f"{name}.weights_scaling_factor",
                dtype="F32",
                shape=(out, inner // group) if int4 else (out,),
                chunks=scale,
            ),
            _constant(f"{name}.prequant_scaling_factor", self._dtype, ones),
        ]
        if not int4:
            static = np.array([self._plan.input_scales[linear.first]], np.float32)
            tensors.append(_constant(f"{name}.activation_scaling_factor", "F32", static))
        return tensors

    def _integers(
        self, linear: FusedLinear, precision: Precision
    ) -> Iterator[tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]]:
        """Integers `(rows, in)` and scales `(rows, groups)` of a rank's rows and columns; rows are even in number."""
        ranks = self._plan.ranks
        columns = linear.columns(ranks, self._tp_rank)
        for module, part in linear.rows(ranks, self._tp_rank):
            whole = linear.modules[module][1]
            for chunk in _chunks(part, whole):
                stored = self._rows(module, precision, chunk)
                assert stored.scale is not None
                values = stored.data.view(np.int8)
                if precision.dtype == "int4":
                    values = (unpack_nibbles(stored.data.view(np.uint8)) ^ 8).view(np.int8) - np.int8(8)
                scale = stored.scale.astype(np.float32)
                if precision.group_size is not None:
                    scale = scale[:, columns.start // precision.group_size : columns.stop // precision.group_size]
                yield np.ascontiguousarray(values[:, columns]), scale

    def _rows(self, module: str, precision: Precision, rows: slice) -> QuantizedRows:
        if isinstance(self._source, QuantizedCheckpoint) and module in self._source.quantized:
            return self._source.stored(module, rows)
        name = f"{module}.weight"
        try:
            return quantize_rows(self._source.read(name, rows), precision)
        except BuildError as error:
            raise BuildError(f"{name} {error.message}", error.hint) from None


def _constant(name: str, dtype: str, values: npt.NDArray[np.generic]) -> StreamedTensor:
    return StreamedTensor(name=name, dtype=dtype, shape=values.shape, chunks=lambda: [values])


def _chunks(rows: slice, width: int) -> Iterator[slice]:
    """Consecutive parts of some rows that are a few megabytes each, of an even number of rows but for the last."""
    step = max(2, _CHUNK_VALUES // width // 2 * 2)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(rows.stop, start + step))
