// Choosing a token from a row of logits: argmax, truncation, and the exponential race with Philox noise.
//
// Knows: kernels/philox.py's definition: E = -log((word + 0.5) · 2⁻³²), the token with the least E / p wins, the lowest
// id of equals. A float pass over the vocabulary finds every token that could win, and those few are settled in double,
// so the winner is that of the double-precision definition.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr int NON_FINITE = -1;  // kernels.base.NON_FINITE

// Mirrored by library.Draw.
struct Draw {
    double temperature, top_p, min_p;
    uint64_t seed;
    uint32_t position, purpose;
    int64_t top_k;  // 0: all
};

// The first largest of x, NON_FINITE when x has NaN or +inf or nothing above -inf.
static int64_t argmax_row(const float* x, int64_t count) {
    VF best = splat(-INFINITY);
    VI bad{};
    int64_t i = 0;
    for (; i + L <= count; i += L) {
        const VF v = load<VF>(x + i);
        bad |= ~(v < INFINITY);  // NaN and +inf
        best = vmax(v, best);
    }
    float top = max_lanes<float>(best);
    bool broken = max_lanes<int32_t>(bad & 1) != 0;
    for (; i < count; i++) {
        broken |= !(x[i] < INFINITY);
        top = x[i] > top ? x[i] : top;
    }
    if (broken || top == -INFINITY) return NON_FINITE;
    for (i = 0; i + L <= count; i += L)
        if (max_lanes<int32_t>((load<VF>(x + i) == top) & 1) != 0) break;
    while (x[i] != top) i++;
    return i;
}

// High and low 32 bits of a · constant.
SG_INLINE void multiply(VU a, uint32_t constant, VU* high, VU* low) {
#if SG_PATH >= SG_AVX2 && SG_PATH != SG_AVX512_VNNI
    // The widening multiply takes even lanes; odd ones are shifted down. (Through 64-bit lanes the compiler does worse.)
    const __m256i x = bits<__m256i>(a), c = _mm256_set1_epi32(static_cast<int>(constant));
    const __m256i even = _mm256_mul_epu32(x, c), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), c);
    *high = bits<VU>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA));
    *low = bits<VU>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA));
#else
    const VU64 product = __builtin_convertvector(a, VU64) * static_cast<uint64_t>(constant);
    *high = __builtin_convertvector(product >> 32, VU);
    *low = a * constant;
#endif
}

// Word 0 of Philox4x32-10 for L consecutive tokens.
SG_INLINE VU philox(VU token, const Draw& d) {
    VU c0 = token, c1 = splat(d.position), c2 = splat(d.purpose), c3{};
    uint32_t k0 = static_cast<uint32_t>(d.seed), k1 = static_cast<uint32_t>(d.seed >> 32);
    for (int round = 0; round < 10; round++) {
        VU high0, low0, high1, low1;
        multiply(c0, 0xD2511F53u, &high0, &low0);
        multiply(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0, c1 = low1;
        c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

SG_INLINE double exponential(uint32_t word) { return -std::log((static_cast<double>(word) + 0.5) * 0x1p-32); }

SG_INLINE VF unsigned_to_float(VU x) {
    return to_float(bits<VI>(x >> 16)) * 65536.0f + to_float(bits<VI>(x & 0xFFFFu));
}

// E of every lane, to a few parts in 10⁶ also where u is next to 1 (where E is small, and the winners are).
SG_INLINE VF exponentials(VU word) {
    const VF gap = (unsigned_to_float(~word) + 0.5f) * 0x1p-32f;  // 1 - u, without cancellation
    const VF u = (unsigned_to_float(word) + 0.5f) * 0x1p-32f;
    // -log(1 - g) = g + g²/2 + g³/3 + … : for g < 2⁻⁵ five terms reach 10⁻⁸.
    VF series = fma(gap, splat(0.2f), splat(0.25f));
    series = fma(gap, series, splat(1.0f / 3.0f));
    series = fma(gap, series, splat(0.5f));
    series = fma(gap * gap, series, gap);
    return gap < 0x1p-5f ? series : -vlog(u);
}

constexpr float SLACK = 1.0001f;  // far above the float pass's error

// log-free score E · e^((top - x) / T) of L tokens; the least wins.
SG_INLINE VF scores_at(VF x, float top, float inverse, int64_t token, const Draw& d) {
    const VF e = exponentials(philox(bits<VU>(lane_numbers() + static_cast<int32_t>(token)), d));
    const VF lag = (top - x) * inverse;
    // e^88 stands for every larger factor: such a token cannot win against the top one unless E is below 10⁻³⁰.
    return lag < 88.0f ? e * vexp(lag) : splat(INFINITY);
}

SG_INLINE double score_exactly(float x, float top, double temperature, int64_t token, const Draw& d) {
    const VU word = philox(splat(static_cast<uint32_t>(token)), d);
    return exponential(word[0]) * std::exp((static_cast<double>(top) - static_cast<double>(x)) / temperature);
}

struct Candidate {
    double score;
    int64_t token;
    bool operator<(const Candidate& o) const { return score < o.score || (score == o.score && token < o.token); }
};

// The winner among tokens [begin, end).
static Candidate race_dense(const float* x, int64_t begin, int64_t end, float top, const Draw& d) {
    const float inverse = static_cast<float>(1.0 / d.temperature);
    Candidate best{INFINITY, INT64_MAX};
    float limit = INFINITY;
    for (int64_t i = begin; i < end; i += L) {
        const int count = static_cast<int>(std::min<int64_t>(L, end - i));
        VF v = load_part(x + i, count);
        VF score = scores_at(v, top, inverse, i, d);
        if (max_lanes<int32_t>((score <= limit) & 1) == 0) continue;
        for (int lane = 0; lane < count; lane++) {
            if (!(score[lane] <= limit) || x[i + lane] == -INFINITY) continue;
            best = std::min(best, {score_exactly(x[i + lane], top, d.temperature, i + lane, d), i + lane});
            limit = static_cast<float>(best.score) * SLACK;
        }
    }
    return best;
}

struct Ranked {
    float x;
    int32_t token;
    bool operator<(const Ranked& o) const { return x > o.x || (x == o.x && token < o.token); }
};

// Tokens that survive top-k, top-p and min-p, best first.
static void truncate(const float* x, int64_t count, float top, const Draw& d, std::vector<Ranked>& kept) {
    kept.clear();
    // Everything below this carries no weight in double precision: e^-745 is 0.
    const double floor = static_cast<double>(top) - 746.0 * d.temperature;
    for (int64_t i = 0; i < count; i++)
        if (static_cast<double>(x[i]) >= floor && x[i] > -INFINITY) kept.push_back({x[i], static_cast<int32_t>(i)});
    auto weight = [&](const Ranked& r) {
        return std::exp((static_cast<double>(r.x) - static_cast<double>(top)) / d.temperature);
    };
    size_t sorted = 0;
    if (d.top_k > 0 && static_cast<size_t>(d.top_k) < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + d.top_k, kept.end());
        kept.resize(static_cast<size_t>(d.top_k));
    }
    if (d.top_p < 1.0) {
        double total = 0.0, before = 0.0;
        for (const Ranked& r : kept) total += weight(r);
        size_t n = 0;
        for (; n < kept.size(); n++) {
            if (n == sorted) {  // sort only as far as the mass reaches
                const size_t next = std::min(kept.size(), sorted == 0 ? size_t{64} : sorted * 4);
                std::partial_sort(kept.begin() + static_cast<int64_t>(sorted), kept.begin() + static_cast<int64_t>(next),
                                  kept.end());
                sorted = next;
            }
            if (n > 0 && before >= d.top_p * total) break;
            before += weight(kept[n]);
        }
        kept.resize(n);
    }
    if (d.min_p > 0.0) std::erase_if(kept, [&](const Ranked& r) { return weight(r) < d.min_p; });
}

static int64_t race_truncated(const float* x, int64_t count, float top, const Draw& d, std::vector<Ranked>& kept) {
    truncate(x, count, top, d, kept);
    Candidate best{INFINITY, INT64_MAX};
    for (const Ranked& r : kept) best = std::min(best, {score_exactly(r.x, top, d.temperature, r.token, d), r.token});
    return best.token;
}

static int64_t gumbel_argmax(Pool& pool, const float* x, int64_t count, const Draw& d, std::vector<Ranked>& kept) {
    const int64_t first = argmax_row(x, count);
    if (first == NON_FINITE || d.temperature == 0.0) return first;
    if (d.top_k > 0 || d.top_p < 1.0 || d.min_p > 0.0) return race_truncated(x, count, x[first], d, kept);
    std::vector<Candidate> best(static_cast<size_t>(pool.size));
    pool.run([&](int thread) {
        Share share((count + L - 1) / L, thread, pool.size);
        best[static_cast<size_t>(thread)] =
            race_dense(x, share.begin * L, std::min(share.end * L, count), x[first], d);
    });
    return std::min_element(best.begin(), best.end())->token;
}
