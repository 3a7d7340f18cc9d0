"""Tiny GGUF files, written by gguf-py as llama.cpp's converters write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specgen.text.tokenizer import BYTE_ALPHABET

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 64, 4, 2, 16, 96, 288

BYTE_TOKENS = list(BYTE_ALPHABET)  # 256 one-byte tokens, in GPT-2's alphabet
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: the order in which q and k rows are stored."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tokenizer_keys(pre: str = "gpt-2", special: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A byte-level BPE vocabulary of VOCAB tokens: bytes, merges, control tokens, and unused ids."""
    words = [merge.replace(" ", "") for merge in MERGES]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*BYTE_TOKENS, *words, *control]
    kinds = [1] * (256 + len(words)) + [3] * len(control)
    unused = VOCAB - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"<unused{index}>" for index in range(unused))],
        "tokenizer.ggml.token_type": [*kinds, *([5] * unused)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        **(special or {}),
    }


def model_keys(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    keys = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000.0,
        **changes,
    }
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}


def weights(seed: int = 0, layers: int = 1) -> dict[str, np.ndarray]:
    """The matrices of the layers by GGUF name, in Hugging Face's row order, and norms."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN)}
    for index in range(layers):
        shapes |= {
            f"blk.{index}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{index}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{index}.ffn_gate": (INTER, HIDDEN),
            f"blk.{index}.ffn_up": (INTER, HIDDEN),
            f"blk.{index}.ffn_down": (HIDDEN, INTER),
            f"blk.{index}.attn_norm": (HIDDEN,),
            f"blk.{index}.ffn_norm": (HIDDEN,),
        }
    shapes["output_norm"] = (HIDDEN,)
    return {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    arch: str = "llama",
    quant: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """`tensors` as they are given (matrices packed as `quant`), model and tokenizer keys unless `keys` is given."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (keys if keys is not None else {**model_keys(arch), **tokenizer_keys()}).items():
        add_key(writer, key, value)
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or quant == "F32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def llama_file(path: Path, quant: str = "F32", **changes: Any) -> Path:
    """A Llama of one layer (or `block_count`), q and k rows stored as llama.cpp stores them."""
    layers = changes.get("block_count", 1)
    tensors = weights(layers=layers)
    for index in range(layers):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            key = f"blk.{index}.{name}.weight"
            tensors[key] = permuted(tensors[key], heads)
    return write_gguf(path, tensors, quant=quant, keys={**model_keys(**changes), **tokenizer_keys()})


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_file(path: Path, template: str = CHATML, **changes: Any) -> Path:
    """`llama_file` with a chat template that has roles."""
    tensors = weights()
    tensors["blk.0.attn_q.weight"] = permuted(tensors["blk.0.attn_q.weight"], HEADS)
    tensors["blk.0.attn_k.weight"] = permuted(tensors["blk.0.attn_k.weight"], KV_HEADS)
    keys = {**model_keys(**changes), **tokenizer_keys(special={"tokenizer.chat_template": template})}
    return write_gguf(path, tensors, keys=keys)
