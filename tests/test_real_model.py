"""The promises on the default model: one text per seed, one set of logits per prefix, the oracle's greedy text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specgen.cache import KVCache
from specgen.events import Event, Finished
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder
from specgen.model.families import spec_from_config
from specgen.model.weights import load_weights
from specgen.options import LoadOptions, RunOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load
from specgen.step import EagerRunner
from specgen.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow

COPYING = "List the alphabet twice: a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k"
FREE = "Tell me about the sea in winter."


@pytest.fixture(scope="module")
def session(smollm2_path: Path) -> Session:
    return load(resolve_model(str(smollm2_path), load_registry()), LoadOptions(context_tokens=1024))


def finish(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


def answer(session: Session, text: str, **options) -> Finished:
    return finish(session.generate(session.prompt_ids(text), RunOptions(**options)))


@pytest.mark.parametrize("text", [COPYING, FREE], ids=["copying", "free"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(),
        SamplingOptions(temperature=0.8, top_p=0.95, seed=11),
        SamplingOptions(temperature=1.0, top_k=40, min_p=0.02, repetition_penalty=1.1, seed=3),
    ],
    ids=["greedy", "warm", "penalised"],
)
def test_same_seed_same_tokens_however_you_speculate(session: Session, text: str, sampling: SamplingOptions) -> None:
    plain = answer(session, text, sampling=sampling, max_tokens=48, proposer="none").token_ids
    for gamma in [*range(9), None]:
        spoken = answer(session, text, sampling=sampling, max_tokens=48, proposer="ngram", gamma=gamma)
        assert spoken.token_ids == plain, f"gamma {gamma}"


def test_speculation_really_happens(session: Session) -> None:
    record = answer(session, COPYING, max_tokens=64, proposer="ngram", gamma=6).record
    assert record.accepted >= 8
    assert len(record.cycles) <= record.completion_tokens - 8


def logits_of(session: Session, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """(len(ids), V): the rows' logits when they are computed in steps of these sizes."""
    spec = session.loaded.spec
    cache = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, 256, torch.bfloat16)
    rows, done = [], 0
    for size in chunks:
        part = ids[done : done + size]
        with cache.transaction(len(part)):
            rows.append(session.engine.runner.step(part, range(-1, len(part) - 1), cache).logits)
            cache.commit(len(part))
        done += len(part)
    assert done == len(ids)
    return torch.cat(rows)


def test_logits_are_a_function_of_the_tokens_alone(session: Session) -> None:
    """Bit for bit: every width 1 … 17, random chunks, after rollbacks, and behind a prefill."""
    ids = session.tokenizer.encode(FREE + " " + COPYING, add_special=False) * 2
    ids = ids[:34]
    expected = logits_of(session, ids, [1] * 34)
    for width in range(2, 18):
        sizes = [width] * (34 // width) + ([34 % width] if 34 % width else [])
        assert torch.equal(logits_of(session, ids, sizes), expected), f"width {width}"
    rng = random.Random(0)
    for _ in range(3):
        sizes = []
        while sum(sizes) < 34:
            sizes.append(min(rng.randint(1, 17), 34 - sum(sizes)))
        assert torch.equal(logits_of(session, ids, sizes), expected), sizes
    assert not torch.equal(logits_of(session, [*ids[:-2], ids[-2] + 1, ids[-1]], [34]), expected), "the check can fail"


def test_a_prefilled_prefix_has_the_bits_of_single_steps(session: Session) -> None:
    ids = session.tokenizer.encode(COPYING * 4, add_special=False)[:90]
    expected = logits_of(session, ids, [1] * 90)[-1]
    spec = session.loaded.spec
    for cut in (1, 17, 64, 89):
        cache = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, 256, torch.bfloat16)
        runner = session.engine.runner
        with cache.transaction(cut):
            runner.prefill(ids[:cut], cache)
            cache.commit(cut)
        with cache.transaction(20):  # a detour that is rolled back
            runner.step(ids[:20], range(-1, 19), cache)
        with cache.transaction(90 - cut):
            out = runner.prefill(ids[cut:], cache)
            cache.commit(90 - cut)
        assert torch.equal(out.logits[-1], expected), f"prefill of {cut}"


def test_rows_of_a_tree_have_the_bits_of_their_own_chain(session: Session) -> None:
    ids = session.tokenizer.encode(FREE, add_special=False)
    spec = session.loaded.spec
    parents, tokens = [-1, 0, 0, 1, 2, 2, 4], [ids[-1], 40, 50, 60, 70, 80, 90]
    cache = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, 256, torch.bfloat16)
    with cache.transaction(len(ids) - 1):
        session.engine.runner.prefill(ids[:-1], cache)
        cache.commit(len(ids) - 1)
    with cache.transaction(len(tokens)):
        tree = session.engine.runner.step(tokens, parents, cache).logits
    for row in range(len(tokens)):
        path, node = [], row
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        chain = [*ids[:-1], *reversed(path)]
        assert torch.equal(tree[row], logits_of(session, chain, [1] * len(chain))[-1]), f"row {row}"


EOS = 2
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
]


Text = tuple[list[int], list[int], torch.Tensor]


def oracle_model(path: Path) -> torch.nn.Module:
    """transformers' Llama in float32 with the weights as gguf-py dequantises them."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    heads = {"attn_q": 9, "attn_k": 3}
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
    }
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *block, kind, _ = tensor.name.split(".")
        if kind in heads:  # rows are stored for interleaved rotation: (heads, D / 2, 2) → (heads, 2, D / 2)
            weight = weight.view(heads[kind], 32, 2, 576).transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{block[1]}.{names[kind]}.weight" if block else f"{names[kind]}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def oracle_texts(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """(prompt, 64 greedy tokens, logits before each of them (64, V)) from transformers."""
    from specgen.text.tokenizer import load_tokenizer

    model = oracle_model(smollm2_path)
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path), tmp_path_factory.mktemp("tokenizers"))
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special=False)
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=64,
                min_new_tokens=64,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        texts.append((ids, out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)))
    return texts


def forced_logits(model: Decoder, dtype: torch.dtype, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, the oracle's), both (64, V), before each token of the oracle's text; without EOS, which it was denied."""
    ids, greedy, expected = text
    whole = [*ids, *greedy[:-1]]
    cache = model.new_cache(256, dtype)
    with cache.transaction(len(whole)):
        out = EagerRunner(model, max_rows=128).step(whole, range(-1, len(whole) - 1), cache).logits[len(ids) - 1 :]
    keep = torch.arange(out.shape[1]) != EOS
    return out[:, keep], expected[:, keep]


def test_reference_decoder_agrees_with_transformers(smollm2_path: Path, oracle_texts: list) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    spec = spec_from_config(checkpoint.config)
    model = Decoder(spec, load_weights(checkpoint, spec, torch.device("cpu")), ReferenceKernels())
    for text in oracle_texts:
        ours, expected = forced_logits(model, torch.float32, text)
        assert float((ours - expected).abs().max()) < 2e-3
        assert torch.equal(ours.argmax(-1), expected.argmax(-1)), "64 greedy tokens"


def test_cpu_backend_stays_near_the_oracle(session: Session, oracle_texts: list) -> None:
    """Activations in int8 and a cache in bfloat16 move logits a little: KL per token, and only near ties change."""
    model = session.engine.runner.model
    for text in oracle_texts:
        ours, expected = forced_logits(model, torch.bfloat16, text)
        p, q = expected.log_softmax(-1), ours.log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1)
        changed = ours.argmax(-1) != expected.argmax(-1)
        top = expected.topk(2).values
        gaps = (top[:, 0] - top[:, 1])[changed]
        print(f"KL {divergence.mean():.4f} per token, {int(changed.sum())} of 64 argmax changed, gaps {gaps.tolist()}")
        assert float(divergence.mean()) < 0.01
        assert bool((gaps < 0.5).all())
