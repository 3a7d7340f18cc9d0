"""The vocabulary in a GGUF file → a `tokenizers` tokenizer.

Knows: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"), as llama.cpp's src/llama-vocab.cpp reads them. Does not
know: caches, chat templates. A kind that is not known is refused by name: a wrong split gives a model text that it was
never trained on, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specgen.errors import ModelError, nearest
from specgen.weights.gguf_pre import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
MAX_PIECE = 512  # characters; longer pieces cannot come out of training and would cost quadratic time here
SPACE = "▁"
_KEY = "tokenizer.ggml."


class GgufVocab:
    """The checked arrays of one file: token texts, their kinds, and the keys beside them."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{path} has no tokenizer (metadata key {_KEY}tokens)")
        # llama.cpp gives an empty token a name too: ids must stay where they are.
        self.tokens: list[str] = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.kinds = self._numbers("token_type", [NORMAL] * len(tokens))
        if len(set(self.tokens)) != len(self.tokens):
            raise ModelError(f"{path}: a token occurs twice in {_KEY}tokens")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_KEY + key, default)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def _numbers(self, key: str, default: Sequence[float]) -> list[Any]:
        values = self.get(key)
        if values is None:
            return list(default)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise ModelError(f"{self.path}: {_KEY}{key} does not have one number per token ({len(self.tokens)})")
        return list(values.tolist())

    def scores(self) -> list[float]:
        scores = self._numbers("scores", [])
        if not scores:
            raise ModelError(f"{self.path}: {_KEY}scores is missing, which a SentencePiece vocabulary needs")
        return [float(score) for score in scores]

    def merges(self) -> list[tuple[str, str]]:
        merges = self.get("merges")
        if not isinstance(merges, list):
            raise ModelError(f"{self.path}: {_KEY}merges is missing, which a BPE vocabulary needs")
        pairs = []
        for merge in merges:
            # A token may itself be or begin with a space-like character, so the separator is sought behind the first.
            left, found, right = merge[1:].partition(" ")
            if not found:
                raise ModelError(f"{self.path}: {_KEY}merges has {merge!r}, which is no pair")
            pairs.append((merge[:1] + left, right))
        return pairs

    def token(self, key: str) -> str | None:
        """The text of the token that metadata key `key` names by id."""
        index = self.get(key)
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None


def to_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """A tokenizer that encodes as the model was trained to. ModelError names what is missing or not known."""
    vocab = GgufVocab(metadata, path)
    kind = vocab.get("model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(
            f"{path}: the tokenizer kind {kind!r} is not known",
            hint="known are gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
        )
    try:
        tokenizer = builders[kind](vocab)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for whatever it dislikes
        raise ModelError(f"{path}: the tokenizer's tables contradict each other: {error}") from error
    _add_tokens(tokenizer, vocab)
    return tokenizer


def _pre_tokenizer(vocab: GgufVocab) -> PreTokenizer:
    name = vocab.get("pre")
    if not isinstance(name, str):
        raise ModelError(
            f"{vocab.path} does not say how its tokenizer splits text ({_KEY}pre)",
            hint="the file is old: convert the model anew with a current llama.cpp, or use its safetensors version",
        )
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocab.path}: the pre-tokenizer {name!r} ({_KEY}pre) is not known",
            hint=nearest(name, PRE_TOKENIZERS) or "use the model's safetensors version with its tokenizer.json",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(vocab: GgufVocab) -> Tokenizer:
    pre = _pre_tokenizer(vocab)
    ids = {token: index for index, token in enumerate(vocab.tokens)}
    known = [pair for pair in vocab.merges() if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]
    model = models.BPE(vocab=ids, merges=known, fuse_unk=False, ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    prefix = vocab.flag("add_space_prefix", False)
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    _add_edges(tokenizer, vocab, bos=pre.add_bos)
    return tokenizer


def _sentencepiece(vocab: GgufVocab) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocab.tokens)}
    unknown = next(
        (token for token, kind in zip(vocab.tokens, vocab.kinds, strict=True) if kind == UNKNOWN),
        vocab.token("unknown_token_id"),
    )
    bytes_known = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    model = models.BPE(
        vocab=ids, merges=_merges_by_score(vocab, ids), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known
    )
    tokenizer = Tokenizer(model)
    prefix = vocab.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_edges(tokenizer, vocab, bos=True)
    return tokenizer


def _merges_by_score(vocab: GgufVocab, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose join is a piece, the best score first: the merges that SentencePiece makes.

    SentencePiece merges the neighbours whose join scores highest (1808.06226, section 3.2); a list in the order of that
    score does the same. Pairs with one join are ordered as transformers orders them, by length from left to right.
    """
    normal = {
        token
        for token, kind in zip(vocab.tokens, vocab.kinds, strict=True)
        if kind == NORMAL and len(token) <= MAX_PIECE
    }
    scores = vocab.scores()
    pairs = [
        (scores[ids[token]], cut, token)
        for token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    pairs.sort(key=lambda pair: (-pair[0], -pair[1], ids[pair[2]]))
    return [(token[:cut], token[cut:]) for _, cut, token in pairs]


def _add_edges(tokenizer: Tokenizer, vocab: GgufVocab, *, bos: bool) -> None:
    """BOS before and EOS behind a text, where the model wants them."""
    first = vocab.token("bos_token_id") if vocab.flag("add_bos_token", bos) else None
    last = vocab.token("eos_token_id") if vocab.flag("add_eos_token", False) else None
    if first is None and last is None:
        return
    edges = [(text, vocab.tokens.index(text)) for text in (first, last) if text is not None]
    # Ids are given by name and number, so that a text with a colon or a dollar sign in it cannot be misread.
    template = [edge for edge in (first, "$A", last) if edge is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B"], special_tokens=list(dict(edges).items())
    )


def _add_tokens(tokenizer: Tokenizer, vocab: GgufVocab) -> None:
    """Control tokens are special; user-defined ones are matched whole in any text."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokens = [
            AddedToken(token, normalized=False, special=special, rstrip=special and _eats_space(vocab, token))
            for token, its_kind in zip(vocab.tokens, vocab.kinds, strict=True)
            if its_kind == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)


def _eats_space(vocab: GgufVocab, token: str) -> bool:
    """Phi-3's markers swallow the white space behind them (tokenizer_config.json: rstrip); GGUF has no key for it."""
    phi = vocab.metadata.get("general.architecture") == "phi3" and vocab.get("model") == "llama"
    return phi and token not in ("<unk>", "<s>", "<|endoftext|>")
