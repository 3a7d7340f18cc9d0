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

// The largest of a part of a row, and the first place where it stands.
struct Top {
    float value = -INFINITY;
    bool broken = false;  // by NaN or +inf
    int64_t index = NON_FINITE;

    // What stands behind this part is not larger only because it is equal.
    void join(const Top& behind) {
        broken |= behind.broken;
        if (behind.value > value) value = behind.value, index = behind.index;
    }
    int64_t token() const { return broken ? NON_FINITE : index; }
};

static Top top_of(const float* x, int64_t begin, int64_t end) {
    VF best = splat(-INFINITY);
    VI bad{};
    int64_t i = begin;
    for (; i + L <= end; i += L) {
        const VF v = load<VF>(x + i);
        bad |= ~(v < INFINITY);  // NaN and +inf
        best = vmax(v, best);
    }
    Top top{max_lanes<float>(best), max_lanes<int32_t>(bad & 1) != 0};
    for (; i < end; i++) {
        top.broken |= !(x[i] < INFINITY);
        top.value = x[i] > top.value ? x[i] : top.value;
    }
    if (top.broken || top.value == -INFINITY) return top;
    for (i = begin; i + L <= end; i += L)
        if (max_lanes<int32_t>((load<VF>(x + i) == top.value) & 1) != 0) break;
    while (x[i] != top.value) i++;
    top.index = i;
    return top;
}

// The first largest of x, NON_FINITE when x has NaN or +inf or nothing above -inf.
static int64_t argmax_row(const float* x, int64_t count) { return top_of(x, 0, count).token(); }

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
SG_INLINE VF scores_of(VF x, float top, float inverse, VI token, const Draw& d) {
    const VF e = exponentials(philox(bits<VU>(token), d));
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
        VF score = scores_of(v, top, inverse, lane_numbers() + static_cast<int32_t>(i), d);
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

SG_INLINE double weight_of(const Ranked& r, float top, const Draw& d) {
    return std::exp((static_cast<double>(r.x) - static_cast<double>(top)) / d.temperature);
}

// Tokens by how far they lag behind the top one, in steps of 1 / 8: a step holds an eighth more or less of each weight,
// and what is behind lies in the last one.
constexpr int LAGS = 512;
SG_INLINE int lag_of(float x, float top, float inverse) {
    const float lag = (top - x) * inverse * 8.0f;
    return lag < LAGS - 1 ? static_cast<int>(lag) : LAGS - 1;
}

// Keeps the shortest ranked prefix whose mass reaches top-p, in any order. Mass is summed by lag, so only the tokens of
// the lag that the prefix ends in have to be sorted.
static void cut_top_p(std::vector<Ranked>& kept, float top, const Draw& d) {
    const float inverse = static_cast<float>(1.0 / d.temperature);
    double mass[LAGS] = {};
    for (size_t i = 0; i < kept.size(); i += L) {
        const int count = static_cast<int>(std::min<size_t>(L, kept.size() - i));
        VD lag{};
        for (int lane = 0; lane < count; lane++) lag[lane] = static_cast<double>(kept[i + lane].x);
        const VD weight = vexp((lag - static_cast<double>(top)) / d.temperature);
        for (int lane = 0; lane < count; lane++) mass[lag_of(kept[i + lane].x, top, inverse)] += weight[lane];
    }
    double total = 0.0, before = 0.0;
    for (double m : mass) total += m;
    int last = 0;
    for (; last < LAGS - 1 && before + mass[last] < d.top_p * total; last++) before += mass[last];
    std::erase_if(kept, [&](const Ranked& r) { return lag_of(r.x, top, inverse) > last; });
    auto next = std::partition(kept.begin(), kept.end(),
                               [&](const Ranked& r) { return lag_of(r.x, top, inverse) < last; });
    std::sort(next, kept.end());
    for (; next != kept.end() && (next == kept.begin() || before < d.top_p * total); next++)
        before += weight_of(*next, top, d);
    kept.erase(next, kept.end());
}

// Tokens that survive top-k, top-p and min-p, in any order.
static void truncate(const float* x, int64_t count, float top, const Draw& d, std::vector<Ranked>& kept) {
    kept.clear();
    // Everything below this carries no weight in double precision: e^-745 is 0. Where min-p alone counts, it is the limit,
    // and what stands right at it is looked at again below.
    const double lag = d.top_p < 1.0 || d.min_p == 0.0 ? -746.0 : std::log(d.min_p) - 1e-6;
    const double floor = static_cast<double>(top) + lag * d.temperature;
    for (int64_t i = 0; i < count; i++)
        if (static_cast<double>(x[i]) >= floor && x[i] > -INFINITY) kept.push_back({x[i], static_cast<int32_t>(i)});
    if (d.top_k > 0 && static_cast<size_t>(d.top_k) < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + d.top_k, kept.end());
        kept.resize(static_cast<size_t>(d.top_k));
    }
    if (d.top_p < 1.0) cut_top_p(kept, top, d);
    if (d.min_p > 0.0) std::erase_if(kept, [&](const Ranked& r) { return weight_of(r, top, d) < d.min_p; });
}

// The winner among `kept`: floats for all, doubles for those that could win.
static Candidate race_kept(const std::vector<Ranked>& kept, float top, const Draw& d) {
    const float inverse = static_cast<float>(1.0 / d.temperature);
    Candidate best{INFINITY, INT64_MAX};
    float limit = INFINITY;
    for (size_t i = 0; i < kept.size(); i += L) {
        const int count = static_cast<int>(std::min<size_t>(L, kept.size() - i));
        VF x{};
        VI token{};
        for (int lane = 0; lane < count; lane++) x[lane] = kept[i + lane].x, token[lane] = kept[i + lane].token;
        const VF score = scores_of(x, top, inverse, token, d);
        for (int lane = 0; lane < count; lane++) {
            if (!(score[lane] <= limit)) continue;
            best = std::min(best, {score_exactly(x[lane], top, d.temperature, token[lane], d), token[lane]});
            limit = static_cast<float>(best.score) * SLACK;
        }
    }
    return best;
}

static int64_t gumbel_argmax(Pool& pool, const float* x, int64_t count, const Draw& d, std::vector<Ranked>& kept) {
    const int64_t first = argmax_row(x, count);
    if (first == NON_FINITE || d.temperature == 0.0) return first;
    if (d.top_k > 0 || d.top_p < 1.0 || d.min_p > 0.0) {
        truncate(x, count, x[first], d, kept);
        return race_kept(kept, x[first], d).token;
    }
    std::vector<Candidate> best(static_cast<size_t>(pool.size));
    pool.run([&](int thread) {
        Share share((count + L - 1) / L, thread, pool.size);
        best[static_cast<size_t>(thread)] =
            race_dense(x, share.begin * L, std::min(share.end * L, count), x[first], d);
    });
    return std::min_element(best.begin(), best.end())->token;
}
