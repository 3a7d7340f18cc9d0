"""Checked reading of a `config.json`.

Knows: keys, kinds and bounds of values, and how to say what is wrong with one. Does not know: what a key means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specgen.errors import ModelError

MAX_COUNT = 1 << 31
MAX_LAYERS = 1024

_OUTER_KEYS = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "quantization_config", "torch_dtype", "dtype")


class Settings:
    """A config with a family's defaults behind it. A value of null counts as absent."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **{key: value for key, value in config.items() if value is not None}}

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_COUNT:
            raise self._wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def optional_count(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        """An object; empty when absent."""
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            raise self._wrong(key, f"a list of {layers} entries")
        return value[:layers]

    def layers(self) -> int:
        count = self.count("num_hidden_layers")
        if count > MAX_LAYERS:
            raise ModelError(f"config.json: num_hidden_layers is {count}; at most {MAX_LAYERS} layers are supported")
        return count

    def _wrong(self, key: str, wanted: str) -> ModelError:
        if self.get(key) is None:
            return ModelError(f"config.json: {key} is missing", hint=f"it must be {wanted}")
        return ModelError(f"config.json: {key} is {self.get(key)!r}, not {wanted}")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own settings in the config of a model that also sees or hears."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {key: config[key] for key in _OUTER_KEYS if config.get(key) is not None}
    return {**outer, **{key: value for key, value in inner.items() if value is not None}}
