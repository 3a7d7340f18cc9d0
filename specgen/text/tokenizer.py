"""Text ↔ tokens of one checkpoint.

Knows: where a checkpoint keeps its tokenizer, end tokens and chat template; which bytes a token stands for. Does not
know: streams, prompts, how GGUF vocabularies are converted (weights.gguf_vocab). A converted tokenizer is kept as
`tokenizer.json` in the cache, so that a second start only loads it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from filelock import FileLock

from specgen.errors import ModelError
from specgen.text.shield import segments
from specgen.weights.base import Checkpoint
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_vocab import SPACE, to_tokenizer
from specgen.weights.safetensors_file import load_json

CONVERTER = 1
"""Part of the cache key: raised when the conversion of GGUF vocabularies changes."""

END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<eos>",
    "</s>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Special tokens that end an answer whatever the files say: often they name one only. llama.cpp has a like list."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest is moved behind U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(moved)}


BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """Encodes and decodes. `bos`, `eos_ids` and `special_ids` are token ids; ids below `vocab_size` are known.

    `prefixes_space`: the tokenizer puts a space before every text (SentencePiece), which decoding takes off again.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos: int | None,
        end_ids: Iterable[int],
        chat_template: str | None,
        named: Mapping[str, str],
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._added = core.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._byte_level, self.prefixes_space = _decoder_traits(core)
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self.bos = bos if bos is not None and 0 <= bos < self.vocab_size else None
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self.eos_ids = self._end_ids(end_ids)
        self.chat_template = chat_template
        self.named: Mapping[str, str] = dict(named)  # "bos_token" → its text, …: what a chat template may ask for

    def _end_ids(self, given: Iterable[int]) -> tuple[int, ...]:
        by_text = (self._core.token_to_id(text) for text in END_TEXTS)
        # Only special ones: Gemma and Qwen have </s> as an HTML tag too.
        found = [index for index in by_text if index in self.special_ids]
        return tuple(
            dict.fromkeys(index for index in (*given, *found) if index is not None and 0 <= index < self.vocab_size)
        )

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. `add_special`: BOS (and what else the
        model's tokenizer puts around a text) is added."""
        return list(self._core.encode(text, add_special_tokens=add_special).ids)

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template (`template.render_chat`): the template's special tokens are recognised,
        those that a message forged are not. Nothing is added: the template writes its own BOS."""
        ids: list[int] = []
        for text, shielded in segments(rendered):
            if not shielded:
                ids += self.encode(text, add_special=False)
                continue
            self._core.encode_special_tokens = True
            try:
                ids += self.encode(text, add_special=False)
            finally:
                self._core.encode_special_tokens = False
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence: bytes joined, invalid UTF-8 as U+FFFD. A SentencePiece tokenizer puts a space
        before every text; it is taken off here."""
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text[1:] if self.prefixes_space and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a special token's are its name. Unknown ids have none."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._read_bytes(token)
        return known

    def _read_bytes(self, token: int) -> bytes:
        if token in self._added:
            content: str = self._added[token].content
            return content.encode()
        text = self._core.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._byte_level:
            return b"".join(
                bytes([BYTE_ALPHABET[letter]]) if letter in BYTE_ALPHABET else letter.encode() for letter in text
            )
        match = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(match.group(1), 16)]) if match else text.replace(SPACE, " ").encode()

    @cached_property
    def special_strings(self) -> tuple[str, ...]:
        """The texts of all special tokens: what `template.render_chat` keeps users from forging."""
        return tuple(self._added[index].content for index in sorted(self.special_ids))

    def token_strings(self) -> list[str]:
        """Every token's own spelling by id ("" where an id has none): equal lists mean interchangeable tokenizers."""
        return [self._core.id_to_token(index) or "" for index in range(self.vocab_size)]


def _decoder_traits(core: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(bytes are spelled in GPT-2's alphabet, a text begins with a space of the tokenizer's own)."""
    state = json.loads(core.decoder.__getstate__()) if core.decoder is not None else {}
    steps = state.get("decoders", [state]) if isinstance(state, dict) else []
    kinds = {step.get("type") for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", None}
    if unknown or not kinds:
        raise ModelError(f"the tokenizer decodes with {', '.join(map(str, sorted(unknown)))}, which is not supported")
    metaspace = any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
    return "ByteLevel" in kinds, metaspace or any(step.get("type") == "Strip" and step.get("start") for step in steps)


def load_tokenizer(checkpoint: Checkpoint, cache_dir: Path) -> Tokenizer:
    """The checkpoint's tokenizer. ModelError when it is missing, broken or of an unknown kind."""
    if isinstance(checkpoint, GgufCheckpoint):
        return _from_gguf(checkpoint, cache_dir)
    return _from_folder(checkpoint)


def _from_gguf(checkpoint: GgufCheckpoint, cache_dir: Path) -> Tokenizer:
    config, metadata = checkpoint.config, checkpoint.metadata
    core = _cached(checkpoint, cache_dir)
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        text = core.id_to_token(index) if isinstance(index, int) else None
        if text is not None:
            named[f"{name}_token"] = text
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        core,
        bos=config["bos_token_id"],
        end_ids=config["eos_token_id"],
        chat_template=template if isinstance(template, str) else None,
        named=named,
    )


def _cached(checkpoint: GgufCheckpoint, cache_dir: Path) -> tokenizers.Tokenizer:
    """The converted tokenizer from the cache; converted and put there first when it is not."""
    folder = cache_dir / f"{checkpoint.digest()[:32]}-{CONVERTER}"
    target = folder / "tokenizer.json"
    if (core := _load_if_whole(target)) is not None:
        return core
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if (core := _load_if_whole(target)) is not None:
                return core
            core = to_tokenizer(checkpoint.metadata, checkpoint.path)
            partial = folder / f"tokenizer.json.{os.getpid()}"
            partial.write_text(core.to_str(), encoding="utf-8")
            partial.replace(target)
            return core
    except OSError:
        # A cache that cannot be written (read-only home, full disk) costs a second per start and nothing else.
        return to_tokenizer(checkpoint.metadata, checkpoint.path)


def _load_if_whole(path: Path) -> tokenizers.Tokenizer | None:
    """A cached file, or None when there is none or it cannot be read (then it is written anew)."""
    if not path.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception
        return None


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    folder = checkpoint.path
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json",
            hint="fetch it from the model's page; a tokenizer.model or vocab.json alone is not read",
        )
    load_json(path)
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    settings = _json_if_there(folder / "tokenizer_config.json")
    named = _named_tokens(settings)
    generation = _json_if_there(folder / "generation_config.json")
    ends = [*_ids(generation.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id"))]
    ends += _ids(core.token_to_id(named["eos_token"]) if "eos_token" in named else None)
    bos = core.token_to_id(named["bos_token"]) if "bos_token" in named else None
    first = _ids(checkpoint.config.get("bos_token_id"))
    return Tokenizer(
        core,
        bos=bos if bos is not None else next(iter(first), None),
        end_ids=ends,
        chat_template=_template_of(folder, settings),
        named=named,
    )


def _json_if_there(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}


def _ids(value: object) -> list[int]:
    """A token id, or a list of them, as a list; anything else is none."""
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool)]


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … of tokenizer_config.json, whose values are texts or objects with a `content`."""
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the key in tokenizer_config.json (a text, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
