"""The definition of the ops: right against plain formulas, and bitwise the same for a row whatever its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

from specgen.kernels import reference
from specgen.kernels.base import NON_FINITE, Attend, KVLayer, Noise, Truncation
from specgen.kernels.philox import exponentials, gumbel, philox4x32, uniform, uniforms
from specgen.kernels.reference import ReferenceKernels, quantise_rows, race, truncated_probs
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, QuantLinear

KERNELS = ReferenceKernels()
MAX_ROWS = 17


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_independent(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every row of op(x) has the same bits for R = 1 … len(x), forwards and backwards."""
    alone = [op(x[row : row + 1])[0] for row in range(len(x))]
    for rows in range(1, len(x) + 1):
        assert torch.equal(op(x[:rows]), torch.stack(alone[:rows])), f"{rows} rows differ from single rows"
        flipped = op(x[:rows].flip(0))
        assert torch.equal(flipped, torch.stack(alone[:rows]).flip(0)), f"{rows} rows differ when reversed"


def packed_weights(n: int = 40, k: int = 64) -> dict[str, QuantLinear]:
    generator = torch.Generator().manual_seed(1)
    nibbles = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    scale = torch.rand(n, k // 32, generator=generator) * 0.01
    low = -8 * scale
    q = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
    bias = seeded(n, seed=2)
    return {
        "dense float32": Dense(seeded(n, k, seed=3), bias),
        "dense bfloat16": Dense(seeded(n, k, seed=3).bfloat16()),
        "int4": GroupedInt4(nibbles, scale.half(), low.half(), 32, bias),
        "int8": GroupedInt8(q, scale, 32),
        "int8 with min": GroupedInt8(q, scale, 32, low, bias),
        "fp8": Fp8(seeded(n, k, seed=4).to(torch.float8_e4m3fn), torch.rand(2, 2, generator=generator), (32, 32)),
        "codebook": Codebook4(nibbles, seeded(16, seed=5), scale, 32),
    }


# philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """kat_vectors of Random123, philox4x32 with 10 rounds."""
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def test_every_part_of_the_key_changes_the_draw() -> None:
    noises = [Noise(7, 3), Noise(8, 3), Noise(7 + (1 << 32), 3), Noise(7, 4), Noise(7, 3, purpose=1)]
    draws = {uniform(noise, token) for noise in noises for token in (0, 1)}
    assert len(draws) == 2 * len(noises)
    assert uniform(Noise(7, 3), 1) == float(uniforms(Noise(7, 3), torch.arange(5))[1])


def test_uniforms_are_uniform_and_never_at_an_end() -> None:
    u = uniforms(Noise(2**64 - 1, 11), torch.arange(20_000))
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(gumbel(Noise(5, 11), torch.arange(20_000)).numpy(), "gumbel_r").pvalue > 1e-3


# sampling


def naive_probs(logits: list[float], cut: Truncation) -> list[float]:
    """`Truncation` word for word, in Python floats."""
    if cut.temperature == 0:
        best = max(range(len(logits)), key=lambda token: (logits[token], -token))
        return [float(token == best) for token in range(len(logits))]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if cut.top_k:
        ranked = ranked[: cut.top_k]
    weight = {token: math.exp((logits[token] - max(logits)) / cut.temperature) for token in ranked}
    mass = 0.0
    kept = []
    for token in ranked:
        kept.append(token)
        mass += weight[token] / sum(weight.values())
        if mass >= cut.top_p:
            break
    total = sum(weight[token] for token in kept)
    best_p = weight[kept[0]] / total
    kept = [token for token in kept if weight[token] / total >= cut.min_p * best_p]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


CUTS = [
    Truncation(0.0),
    Truncation(1.0),
    Truncation(1e-6),
    Truncation(0.7, top_k=3),
    Truncation(1.3, top_p=0.8),
    Truncation(1.0, min_p=0.2),
    Truncation(0.9, top_k=6, top_p=0.7, min_p=0.05),
    Truncation(1.0, top_k=100, top_p=1e-9),
]


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_probs_follow_the_definition(cut: Truncation) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0, 0.0, 1.5, -torch.inf, 0.5, 2.0])
    expected = torch.tensor(naive_probs(logits.tolist(), cut))
    torch.testing.assert_close(truncated_probs(logits, cut), expected, rtol=1e-5, atol=1e-7)


def test_equal_logits_are_ranked_by_id() -> None:
    probs = truncated_probs(torch.zeros(3000), Truncation(1.0, top_k=3))
    assert probs.nonzero()[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("cut", CUTS)
def test_gumbel_argmax_draws_from_the_truncated_distribution(cut: Truncation) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0, 0.0, 1.5, -torch.inf, 0.5])
    draws = 1500
    counts = torch.zeros(len(logits))
    for position in range(draws):
        counts[KERNELS.gumbel_argmax(logits, cut, Noise(17, position))] += 1
    probs = truncated_probs(logits, cut)
    assert counts[probs == 0].sum() == 0
    seen = probs > 0
    expected = probs[seen].double() / probs[seen].double().sum() * draws
    assert seen.sum() == 1 or stats.chisquare(counts[seen].double(), expected).pvalue > 1e-3


def test_gumbel_argmax_adds_the_public_noise_to_log_p() -> None:
    logits = seeded(500)
    for position in range(50):
        noise = Noise(3, position)
        expected = (logits.double().log_softmax(-1) + gumbel(noise, torch.arange(500))).argmax()
        assert KERNELS.gumbel_argmax(logits, Truncation(1.0), noise) == int(expected)


def test_race_takes_the_lowest_of_equals_and_never_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert race(torch.tensor([0.0, 0.0, 1e-30, 0.0]), Noise(0, 0)) == 2
    monkeypatch.setattr(reference, "exponentials", lambda noise, ids: torch.ones(len(ids), dtype=torch.float64))
    assert race(torch.tensor([0.0, 0.5, 0.5, 0.25]), Noise(0, 0)) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_logits_are_reported(bad: float) -> None:
    row = seeded(33)
    row[7] = bad
    nothing = torch.full((33,), -torch.inf)
    masked = seeded(33)
    masked[:5] = -torch.inf
    assert KERNELS.argmax(torch.stack((row, nothing, masked))) == [NON_FINITE, NON_FINITE, int(masked.argmax())]
    for cut in (Truncation(), Truncation(1.0)):
        assert KERNELS.gumbel_argmax(row, cut, Noise(0, 0)) == NON_FINITE
        assert KERNELS.gumbel_argmax(nothing, cut, Noise(0, 0)) == NON_FINITE
        assert KERNELS.gumbel_argmax(masked, cut, Noise(0, 0)) >= 5


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, [4000, 170]] = 1.0
    assert KERNELS.argmax(logits) == [0, 170, 0]


# linear, embedding, norms, activations


@pytest.mark.parametrize("kind", packed_weights())
def test_linear_and_embedding_use_the_dequantised_weight(kind: str) -> None:
    weight = packed_weights()[kind]
    prepared = KERNELS.prepare(weight)
    x = seeded(5, 64, seed=9)
    expected = x @ weight.dequantize().T + (0.0 if weight.bias is None else weight.bias)
    torch.testing.assert_close(KERNELS.linear(x, prepared), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(KERNELS.embedding(torch.tensor([3, 0, 3]), prepared), weight.dequantize()[[3, 0, 3]])


@pytest.mark.parametrize(("n", "k"), [(40, 64), (17, 33), (700, 512), (1, 1)])
def test_linear_rows_are_independent(n: int, k: int) -> None:
    weight = KERNELS.prepare(Dense(seeded(n, k)))
    assert_rows_independent(lambda x: KERNELS.linear(x, weight), seeded(MAX_ROWS, k, seed=1))


def test_a_product_that_changes_its_order_would_not_pass() -> None:
    """Mutant: sums in another order when there are several rows, as tuned matrix products do."""
    weight = KERNELS.prepare(Dense(seeded(576, 192)))
    other = KERNELS.prepare(Dense(weight.weight.flip(1)))
    with pytest.raises(AssertionError, match="rows differ"):
        assert_rows_independent(
            lambda x: KERNELS.linear(x, weight) if len(x) == 1 else KERNELS.linear(x.flip(1), other),
            seeded(MAX_ROWS, 192, seed=1),
        )


def test_a_linear_larger_than_a_block_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1024)
    weight, x = seeded(100, 32), seeded(3, 32, seed=1)
    torch.testing.assert_close(KERNELS.linear(x, KERNELS.prepare(Dense(weight))), x @ weight.T)


def test_rms_norm() -> None:
    x, weight = seeded(4, 48) * 3, seeded(48, seed=1)
    expected = functional.rms_norm(x, (48,), weight, 1e-5)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), expected)
    heads = x.view(4, 3, 16)
    torch.testing.assert_close(
        KERNELS.rms_norm(heads, weight[:16], 1e-5), functional.rms_norm(heads, (16,), weight[:16], 1e-5)
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [48, 45])
def test_elementwise_rows_are_independent(activation: str, size: int) -> None:
    """An odd size puts elements in the tail of a vector loop."""
    weight = seeded(size, seed=3)
    assert_rows_independent(lambda x: KERNELS.rms_norm(x, weight, 1e-5), seeded(MAX_ROWS, size))
    assert_rows_independent(lambda x: KERNELS.gated(x, x, activation), seeded(MAX_ROWS, size))


def test_an_activation_with_two_roundings_would_not_pass() -> None:
    """Mutant: another exp for some elements, as in the tail of a vector loop."""
    with pytest.raises(AssertionError, match="rows differ"):
        assert_rows_independent(
            lambda x: functional.silu(x) if len(x) == 1 else functional.silu(x.double()).float(), seeded(MAX_ROWS, 45)
        )


# RoPE and the cache


def new_layer(dtype: torch.dtype = torch.float32, slots: int = 200, heads: int = 2, size: int = 16) -> KVLayer:
    """A cache layer full of NaN (or -128), so that reading a slot that nobody wrote shows."""
    if dtype == torch.int8:
        filled = [torch.full((heads, slots, size), -128, dtype=dtype) for _ in range(2)]
        return KVLayer(*filled, *(torch.full((heads, slots), torch.nan) for _ in range(2)))
    return KVLayer(*(torch.full((heads, slots, size), torch.nan, dtype=dtype) for _ in range(2)))


def angles(rows: int, half: int) -> tuple[Tensor, Tensor]:
    turn = seeded(rows, half, seed=8)
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("half", [8, 3])
def test_rope_is_half_split_and_leaves_the_rest(half: int) -> None:
    q, k, v = seeded(3, 4, 16), seeded(3, 2, 16, seed=1), seeded(3, 2, 16, seed=2)
    cos, sin = angles(3, half)
    layer = new_layer()
    rotated = KERNELS.rope_write(q, k, v, (cos, sin), layer, 5)
    for row in range(3):
        for dim in range(half):
            pair = torch.complex(q[row, :, dim], q[row, :, dim + half]) * torch.complex(cos[row, dim], sin[row, dim])
            torch.testing.assert_close(rotated[row, :, dim], pair.real)
            torch.testing.assert_close(rotated[row, :, dim + half], pair.imag)
    assert torch.equal(rotated[..., 2 * half :], q[..., 2 * half :])
    assert torch.equal(layer.v[:, 5:8], v.transpose(0, 1))
    assert layer.k[:, :5].isnan().all()
    assert layer.k[:, 8:].isnan().all()


def test_no_rope_writes_as_it_is() -> None:
    q, k, v = seeded(2, 4, 16), seeded(2, 2, 16, seed=1), seeded(2, 2, 16, seed=2)
    layer = new_layer()
    assert KERNELS.rope_write(q, k, v, None, layer, 0) is q
    assert torch.equal(layer.k[:, :2], k.transpose(0, 1))


def test_int8_rows_have_a_scale_each_and_round_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 254.0]])
    q, scale = quantise_rows(x)
    assert q.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 0, 2, 127]]
    assert scale.tolist() == [1.0, 0.0, 2.0]


# attention


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One query (heads, D) over keys and values (kv_heads, n, D), in float64."""
    repeat = len(q) // len(k)
    k, v = k.double().repeat_interleave(repeat, 0), v.double().repeat_interleave(repeat, 0)
    scores = (q.double()[:, None] * k).sum(-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.softmax(-1)[..., None] * v).sum(1).float()


def filled(rows: int, dtype: torch.dtype = torch.float32) -> tuple[KVLayer, Tensor]:
    """A layer with `rows` written slots, and queries for them."""
    layer = new_layer(dtype)
    q = seeded(rows, 4, 16, seed=20)
    KERNELS.rope_write(q, seeded(rows, 2, 16, seed=21), seeded(rows, 2, 16, seed=22), None, layer, 0)
    return layer, q


def read(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored.float() if scale is None else stored.float() * scale[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 2.0), (64, 2.0)])
def test_attention_of_a_chain(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    layer, q = filled(150, dtype)
    got = KERNELS.attention(q, layer, Attend.chain(0, 150), 0.25, window, softcap)
    for row in (0, 1, 6, 7, 63, 64, 65, 149):
        seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
        k, v = read(layer.k, layer.k_scale)[:, seen], read(layer.v, layer.v_scale)[:, seen]
        torch.testing.assert_close(got[row], naive_attention(q[row], k, v, 0.25, softcap), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_does_not_depend_on_chunks(dtype: torch.dtype) -> None:
    layer, q = filled(150, dtype)
    whole = KERNELS.attention(q, layer, Attend.chain(0, 150), 0.25, 70, None)
    for size in (1, 17, 64, 100):
        parts = []
        for start in range(0, 150, size):
            attend = Attend.chain(start, min(size, 150 - start))
            parts.append(KERNELS.attention(q[start : start + size], layer, attend, 0.25, 70, None))
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [None, 66])
@pytest.mark.parametrize("start", [0, 3, 62, 130])
def test_a_tree_row_sees_its_path_as_if_it_were_a_chain(start: int, window: int | None) -> None:
    """Bitwise: the row of a tree, and the last row of the chain that its path spells."""
    parents = (-1, 0, 0, 1, 1, 2, 5, 6, 6)
    layer, q = filled(start + len(parents))
    tree = KERNELS.attention(q[start:], layer, Attend.tree(start, parents), 0.25, window, None)
    for row in range(len(parents)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        slots = torch.tensor([*range(start), *(start + node for node in path)])
        chain = KVLayer(layer.k[:, slots], layer.v[:, slots])
        attend = Attend.chain(len(slots) - 1, 1)
        alone = KERNELS.attention(q[start + row : start + row + 1], chain, attend, 0.25, window, None)
        assert torch.equal(tree[row], alone[0])


def test_attention_rows_are_independent() -> None:
    """Siblings of one pending slot in any number and order."""
    layer, q = filled(60 + MAX_ROWS)
    parents = (-1, *([0] * (MAX_ROWS - 1)))
    whole = KERNELS.attention(q[60:], layer, Attend.tree(60, parents), 0.25, None, None)
    for rows in range(1, MAX_ROWS):
        part = KERNELS.attention(q[60 : 60 + rows], layer, Attend.tree(60, parents[:rows]), 0.25, None, None)
        assert torch.equal(part, whole[:rows])


def test_draws_depend_on_ids_not_on_their_order() -> None:
    ids = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exponentials(Noise(1, 2), ids), exponentials(Noise(1, 2), torch.arange(100))[ids])
