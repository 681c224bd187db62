"""Formats of the matrices in a GGUF file: how large their blocks are, which matrix gets which, and who makes them."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from pyprune.errors import ConfigError, MissingDependencyError

Array = np.ndarray[Any, Any]

BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q6_k": (256, 210),
    "q5_k": (256, 176),
    "q4_k": (256, 144),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
}
"""(elements, bytes) of a block of every format that is written; the same as ``gguf.GGML_QUANT_SIZES``."""
FORMATS = tuple(BLOCKS)
"""Formats of matrices; vectors are float32 in all of them."""
FINE = {"q4_0": "q8_0", "q4_1": "q8_0", "q5_0": "q8_0", "q5_1": "q8_0", "q4_k": "q6_k", "q5_k": "q6_k"}
"""Format -> that of the head where the other matrices have it: every logit is made of it. llama.cpp takes q6_k too."""
NARROW = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""K-quant -> format of matrices whose rows are no multiple of 256; llama.cpp's quantizer takes the same."""
FALLBACK = "f16"
"""Format of matrices whose rows are no whole number of blocks of any of these."""


def kind_of(shape: tuple[int, ...], quantise: str, *, head: bool) -> str:
    """Choose the format of a tensor.

    Args:
        shape: rows first.
        quantise: one of :data:`FORMATS`, asked for.
        head: whether it makes the logits (the embedding does where the head is tied to it).
    """
    if len(shape) == 1:
        return "f32"
    kind = FINE.get(quantise, quantise) if head else quantise
    possible = (kind, NARROW.get(kind, kind), FALLBACK)
    return next(option for option in possible if not shape[-1] % BLOCKS[option][0])


def nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a tensor in a format whose blocks divide its rows."""
    elements, size = BLOCKS[kind]
    return math.prod(shape) // elements * size


def check_quantizer(quantise: str) -> None:
    """Refuse a K-quant that cannot be made, before anything is read.

    Raises:
        ConfigError: the installed xllamacpp does not export the quantizer.
        MissingDependencyError: xllamacpp, which brings llama.cpp's quantizer, is not installed.
    """
    if quantise in NARROW:
        llama_cpp_quantizer()


def quantise_values(values: Array, kind: str) -> Array:
    """Convert a matrix or vector to a format.

    Args:
        values: float32, rows first, contiguous.
        kind: a key of :data:`BLOCKS`; rows are whole blocks of it.

    Returns:
        The blocks of each row, uint8 [..., bytes of a row], or floats; f32, f16 and bf16 as the package gguf has them.

    Raises:
        ConfigError, MissingDependencyError: see :func:`check_quantizer`.
    """
    if kind not in NARROW:
        from gguf.quants import quantize

        blocks: Array = quantize(values, ggml_type(kind))
        return blocks
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    out = np.empty((rows, nbytes((columns,), kind)), np.uint8)
    quantise, number = llama_cpp_quantizer(), int(ggml_type(kind))
    share = -(-rows // (os.cpu_count() or 1))

    def run(first: int) -> int:
        count = min(share, rows - first)
        return quantise(number, values.ctypes.data, out.ctypes.data, first * columns, count, columns, None)

    with ThreadPoolExecutor() as threads:  # ctypes releases the GIL
        written = sum(threads.map(run, range(0, rows, max(1, share))))
    if written != out.nbytes:
        raise RuntimeError(f"llama.cpp wrote {written} bytes of {kind}; {out.nbytes} were expected.")
    return out.reshape(*values.shape[:-1], -1)


def ggml_type(kind: str) -> Any:
    """Return the package gguf's type of a format."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind.upper()]


@cache
def llama_cpp_quantizer() -> Callable[..., int]:
    """Return llama.cpp's: (type, values, blocks, first element, rows, columns, importance of columns) -> bytes."""
    try:
        from xllamacpp import xllamacpp
    except ImportError as error:
        raise MissingDependencyError("xllamacpp", "gguf", "Making K-quants with llama.cpp's quantizer") from error
    try:
        function = ctypes.CDLL(str(xllamacpp.__file__)).ggml_quantize_chunk
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"The installed xllamacpp does not give its quantizer to others ({error}). Write the file as f16 and give "
            "it to llama-quantize, or install xllamacpp 2026.10."
        ) from error
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function
