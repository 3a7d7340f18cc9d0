// RMSNorm, gated activations, RoPE, the cache's number formats, and attention over the static cache.
//
// Attention walks positions, not slots: key j of a row is slot j below `start`, and above it the row's own ancestor at
// that depth. So a row of a tree goes through the same blocks as the same tokens decoded one by one. Blocks of KV_BLOCK
// keys start at multiples of it and are folded into a running softmax; RANGE keys make one partial result, and partials
// are merged in order. Ranges depend on positions alone, never on rows or threads: threads only choose who computes them.
#pragma once

#include <algorithm>

#include "pool.h"
#include "simd.h"

constexpr int KV_BLOCK = 64;   // kernels.base.KV_BLOCK
constexpr int RANGE = 128;     // keys of one partial result
constexpr int HEAD_MAX = 512;  // largest head dim

enum KvType : int32_t { KV_F32, KV_BF16, KV_INT8 };
enum Activation : int32_t { SILU, GELU_TANH };

// ---- elementwise ----

SG_INLINE VF activate(VF x, int activation) {
    if (activation == SILU) return x / (1.0f + vexp(-x));
    VF inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + vtanh(inner));
}

static void gate_row(const float* gate, const float* up, float* out, int64_t count, int activation) {
    int64_t i = 0;
    for (; i + L <= count; i += L) store(out + i, activate(load<VF>(gate + i), activation) * load<VF>(up + i));
    const int rest = static_cast<int>(count - i);
    if (rest > 0) store_part(out + i, activate(load_part(gate + i, rest), activation) * load_part(up + i, rest), rest);
}

// out = x · weight / rms(x). Four interleaved sums, in a fixed order. out may be x.
static void rms_norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
    VF sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * L <= size; i += 4 * L)
        for (int s = 0; s < 4; s++) {
            VF v = load<VF>(x + i + s * L);
            sums[s] = fma(v, v, sums[s]);
        }
    for (int s = 0; i < size; i += L, s++) {
        VF v = load_part(x + i, static_cast<int>(size - i));
        sums[s] = fma(v, v, sums[s]);
    }
    const float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const VF inverse = splat(1.0f / std::sqrt(total / static_cast<float>(size) + eps));
    for (i = 0; i + L <= size; i += L) store(out + i, load<VF>(x + i) * inverse * load<VF>(weight + i));
    const int rest = static_cast<int>(size - i);
    if (rest > 0) store_part(out + i, load_part(x + i, rest) * inverse * load_part(weight + i, rest), rest);
}

// Rotates one head in place; cos and sin hold half = dims / 2 values.
SG_INLINE void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

// ---- the cache ----

// One layer's cache: (kv_heads, capacity, dim), scales (kv_heads, capacity). Mirrored by library.KvView.
struct KvView {
    void *k, *v;
    float *k_scale, *v_scale;
    int64_t capacity;
    int32_t kv_heads, dim, type, spare;
};

SG_INLINE int64_t kv_size(int type) { return type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1; }

static void write_int8(const float* x, int dim, int8_t* to, float* scale) {
    VI largest{};
    for (int i = 0; i < dim; i += L) largest = vmax(largest, bits<VI>(load_part(x + i, dim - i)) & 0x7FFFFFFF);
    const int32_t top = max_lanes<int32_t>(largest);
    if (top >= 0x7F800000) {  // a NaN or infinity must not become a number
        memset(to, 0, static_cast<size_t>(dim));
        *scale = NAN;
        return;
    }
    *scale = bits<float>(top) / 127.0f;
    const VF divisor = splat(*scale == 0.0f ? 1.0f : *scale);
    for (int i = 0; i < dim; i += L) {
        VI n = round_to_int(load_part(x + i, dim - i) / divisor);
        n = n > 127 ? splat(127) : n < -127 ? splat(-127) : n;
        VSB bytes = __builtin_convertvector(n, VSB);
        memcpy(to + i, &bytes, static_cast<size_t>(std::min(L, dim - i)));
    }
}

// x (dim) into slot `slot` of head `head`.
static void write_slot(const KvView& kv, bool key, int64_t head, int64_t slot, const float* x) {
    const int64_t row = head * kv.capacity + slot;
    uint8_t* to = static_cast<uint8_t*>(key ? kv.k : kv.v) + row * kv.dim * kv_size(kv.type);
    if (kv.type == KV_F32) {
        memcpy(to, x, sizeof(float) * static_cast<size_t>(kv.dim));
    } else if (kv.type == KV_INT8) {
        write_int8(x, kv.dim, reinterpret_cast<int8_t*>(to), (key ? kv.k_scale : kv.v_scale) + row);
    } else {
        for (int i = 0; i < kv.dim; i += L) {
            VH half = to_bf16(load_part(x + i, kv.dim - i));
            memcpy(to + 2 * i, &half, 2 * static_cast<size_t>(std::min(L, kv.dim - i)));
        }
    }
}

template <int TYPE>
SG_INLINE VF load_kv(const uint8_t* p, float scale) {
    if constexpr (TYPE == KV_F32) return load<VF>(p);
    else if constexpr (TYPE == KV_BF16) return from_bf16(p);
    else return to_float(from_int8(p)) * scale;
}

// Slots [slot, slot + count) of one head as floats, each padded to whole vectors with zeros.
template <int TYPE>
static void read_slots_as(const KvView& kv, bool key, int64_t head, int64_t slot, int64_t count, float* out) {
    constexpr int SIZE = TYPE == KV_F32 ? 4 : TYPE == KV_BF16 ? 2 : 1;
    const int64_t first = head * kv.capacity + slot;
    const uint8_t* from = static_cast<const uint8_t*>(key ? kv.k : kv.v) + first * kv.dim * SIZE;
    const float* scales = (key ? kv.k_scale : kv.v_scale) + (TYPE == KV_INT8 ? first : 0);
    const int whole = kv.dim / L * L, rest = kv.dim - whole;
    for (int64_t i = 0; i < count; i++, from += kv.dim * SIZE) {
        const float scale = TYPE == KV_INT8 ? scales[i] : 1.0f;
        // The next block, while this one is computed with.
        for (int at = 0; at < kv.dim * SIZE; at += 64) __builtin_prefetch(from + KV_BLOCK * kv.dim * SIZE + at);
        for (int d = 0; d < whole; d += L, out += L) store(out, load_kv<TYPE>(from + d * SIZE, scale));
        if (rest == 0) continue;
        uint8_t tail[4 * L] = {};
        memcpy(tail, from + whole * SIZE, static_cast<size_t>(rest * SIZE));
        store(out, load_kv<TYPE>(tail, scale));
        out += L;
    }
}

static void read_slots(const KvView& kv, bool key, int64_t head, int64_t slot, int64_t count, float* out) {
    if (kv.type == KV_F32) read_slots_as<KV_F32>(kv, key, head, slot, count, out);
    else if (kv.type == KV_BF16) read_slots_as<KV_BF16>(kv, key, head, slot, count, out);
    else read_slots_as<KV_INT8>(kv, key, head, slot, count, out);
}

// ---- attention ----

struct Attention {
    const float* q;            // (rows, heads, dim), rotated
    float* out;                // (rows, heads, dim)
    KvView kv;
    int32_t heads, rows, start;
    const int32_t* positions;  // rows
    const int32_t* path;       // (rows, rows): path[r][d] = the row that is r's ancestor at depth d; null for a chain
    float scale, softcap;      // softcap 0: none
    int32_t window;            // 0: none

    int group() const { return heads / kv.kv_heads; }
    int padded() const { return (kv.dim + L - 1) / L * L; }
    int64_t last() const {
        return *std::max_element(positions, positions + rows);
    }
    int64_t ranges() const { return last() / RANGE + 1; }
    int64_t first_key(int row) const { return window > 0 ? std::max(0, positions[row] - window + 1) : 0; }
    int64_t partial_size() const { return padded() + 2; }  // the sum of p · v, then the largest score and the sum of p
};

// A softmax under way: acc (padded), largest score, sum of p.
SG_INLINE void clear_partial(float* p, int padded) {
    memset(p, 0, sizeof(float) * static_cast<size_t>(padded));
    p[padded] = -INFINITY;
    p[padded + 1] = 0.0f;
}

SG_INLINE float exp_one(float x) { return vexp(splat(x))[0]; }

// into += from; both may be empty (largest -inf).
static void merge_partial(float* into, const float* from, int padded) {
    if (from[padded + 1] == 0.0f && from[padded] == -INFINITY) return;
    if (into[padded + 1] == 0.0f && into[padded] == -INFINITY) {
        memcpy(into, from, sizeof(float) * static_cast<size_t>(padded + 2));
        return;
    }
    // Written so that a NaN in either wins.
    const float top = into[padded] > from[padded] ? into[padded] : from[padded];
    const float a = exp_one(into[padded] - top), b = exp_one(from[padded] - top);
    for (int i = 0; i < padded; i += L) store(into + i, fma(load<VF>(from + i), splat(b), load<VF>(into + i) * a));
    into[padded + 1] = into[padded + 1] * a + from[padded + 1] * b;
    into[padded] = top;
}

// Per thread: one block of keys and values as floats, the step's own rows of a tree, a query.
struct AttentionScratch {
    static constexpr int64_t POINTERS = 2 * KV_BLOCK;
    const float **keys, **values;  // KV_BLOCK each
    float *k, *v;                  // (KV_BLOCK, padded)
    float *own_k, *own_v;          // (rows, padded), trees only
    float* query;                  // (group, padded)

    static int64_t floats(const Attention& a) {
        const int64_t own = a.path == nullptr ? 0 : a.rows;
        return 4 * POINTERS + (2 * KV_BLOCK + 2 * own + a.group()) * a.padded();
    }

    AttentionScratch(float* at, const Attention& a) {
        const int64_t padded = a.padded(), own = a.path == nullptr ? 0 : a.rows;
        keys = reinterpret_cast<const float**>(at);
        values = keys + KV_BLOCK;
        k = at + 4 * POINTERS;
        v = k + KV_BLOCK * padded;
        own_k = v + KV_BLOCK * padded;
        own_v = own_k + own * padded;
        query = own_v + own * padded;
    }
};

// Scores of Q queries against keys j … j + L - 1 of the block, four keys at a time so that everything stays in registers:
// not inlined, or what the caller holds in registers would drive the queries out of them.
template <int Q>
__attribute__((noinline)) static void score_keys(const AttentionScratch& s, const float* query, int padded, int j, int low, int high, VF* out) {
    VF sums[Q][L];
    for (int part = 0; part < L; part += 4) {
        const float* key[4];
        for (int i = 0; i < 4; i++) key[i] = s.keys[std::clamp(j + part + i, low, high - 1)];
        VF acc[Q][4] = {};
        for (int d = 0; d < padded; d += L) {
            VF part_of[Q];
            for (int q = 0; q < Q; q++) part_of[q] = opaque(load<VF>(query + q * padded + d));
            for (int i = 0; i < 4; i++) {
                const VF k = load<VF>(key[i] + d);
                for (int q = 0; q < Q; q++) acc[q][i] = fma(part_of[q], k, acc[q][i]);
            }
        }
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < 4; i++) sums[q][part + i] = acc[q][i];
    }
    for (int q = 0; q < Q; q++) out[q] = sum_each(sums[q]);
}

// Scores p[low … high) → e^(score - top), with the partial's largest score and sum brought up to date; returns how much
// what the partial held before has faded. Anything that is not finite makes the whole partial NaN.
static float soften(float* p, int low, int high, float* state) {
    const int begin = low / L * L;
    VF best = splat(-INFINITY);
    VI broken{};
    for (int j = begin; j < high; j += L) {
        const VF score = load<VF>(p + j);
        best = vmax(score, best);
        broken |= ~(score < INFINITY);
    }
    float top = std::max(state[0], max_lanes<float>(best));
    if (max_lanes<int32_t>(broken & 1) != 0) top = NAN;
    const float fade = state[0] == -INFINITY ? 0.0f : exp_one(state[0] - top);
    VF total{};
    for (int j = begin; j < high; j += L) {
        const VF e = vexp(load<VF>(p + j) - top);
        store(p + j, e);
        total += e;
    }
    state[0] = top;
    state[1] = state[1] * fade + sum_lanes(total);
    return fade;
}

// acc = acc · fade + Σ p · v over keys [low, high), for Q queries and W vectors of the head at `d`.
template <int Q, int W>
__attribute__((noinline)) static void add_values(const AttentionScratch& s, const float (*p)[KV_BLOCK], const float* fade, int d, int low,
                          int high, float* const* partial) {
    VF acc[Q][W];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < W; c++) acc[q][c] = load<VF>(partial[q] + d + c * L) * fade[q];
    for (int j = low; j < high; j++)
        for (int c = 0; c < W; c++) {
            const VF v = opaque(load<VF>(s.values[j] + d + c * L));
            for (int q = 0; q < Q; q++) acc[q][c] = fma(splat(p[q][j]), v, acc[q][c]);
        }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < W; c++) store(partial[q] + d + c * L, acc[q][c]);
}

// Fold keys [low, high) of the block (indices in it) into the partials of Q queries that share them.
template <int Q>
static void fold_block(const AttentionScratch& s, const Attention& a, const float* query, int low, int high,
                       float* const* partial) {
    const int padded = a.padded();
    const VI lanes = lane_numbers();
    alignas(64) float p[Q][KV_BLOCK];
    float fade[Q];
    for (int j = low / L * L; j < high; j += L) {
        VF scores[Q];
        score_keys<Q>(s, query, padded, j, low, high, scores);
        const VI seen = (lanes + j >= low) & (lanes + j < high);
        for (int q = 0; q < Q; q++) {
            VF score = scores[q] * a.scale;
            if (a.softcap > 0.0f) score = vtanh(score / a.softcap) * a.softcap;
            store(p[q] + j, seen ? score : splat(-INFINITY));
        }
    }
    for (int q = 0; q < Q; q++) fade[q] = soften(p[q], low, high, partial[q] + padded);
    int d = 0;
    for (; d + 4 * L <= padded; d += 4 * L) add_values<Q, 4>(s, p, fade, d, low, high, partial);
    for (; d < padded; d += L) add_values<Q, 1>(s, p, fade, d, low, high, partial);
}

// All query heads of one row that share a kv head.
template <class Where>
static void fold_row(const AttentionScratch& s, const Attention& a, int64_t head, int row, int low, int high,
                     const Where& result) {
    const int group = a.group(), padded = a.padded();
    for (int g = 0; g < group; g++) {
        const float* q = a.q + (row * static_cast<int64_t>(a.heads) + head * group + g) * a.kv.dim;
        float* to = s.query + g * padded;
        memset(to + padded - L, 0, sizeof(float) * L);
        memcpy(to, q, sizeof(float) * static_cast<size_t>(a.kv.dim));
    }
    float* partial[3];
    for (int g = 0; g < group;) {
        const int count = std::min(3, group - g);
        for (int i = 0; i < count; i++) partial[i] = result(row, g + i);
        const auto fold = count == 3 ? fold_block<3> : count == 2 ? fold_block<2> : fold_block<1>;
        fold(s, a, s.query + g * padded, low, high, partial);
        g += count;
    }
}

// Keys and values of the block at `begin` that stand in their own slots, as floats.
static void read_block(AttentionScratch& s, const Attention& a, int64_t head, int64_t begin, int64_t first) {
    const int64_t slots = a.path == nullptr ? a.start + a.rows : a.start;
    const int64_t end = std::min<int64_t>(begin + KV_BLOCK, slots);
    const int64_t from = std::max(begin, first);
    if (from >= end) return;
    const int padded = a.padded();
    const float *k = s.k + (from - begin) * padded, *v = s.v + (from - begin) * padded;
    if (a.kv.type == KV_F32 && a.kv.dim % L == 0) {
        const int64_t at = (head * a.kv.capacity + from) * a.kv.dim;
        k = static_cast<const float*>(a.kv.k) + at;
        v = static_cast<const float*>(a.kv.v) + at;
    } else {
        read_slots(a.kv, true, head, from, end - from, s.k + (from - begin) * padded);
        read_slots(a.kv, false, head, from, end - from, s.v + (from - begin) * padded);
    }
    for (int64_t i = from - begin; i < end - begin; i++, k += padded, v += padded) s.keys[i] = k, s.values[i] = v;
}

static void read_own_rows(AttentionScratch& s, const Attention& a, int64_t head) {
    if (a.path == nullptr) return;
    read_slots(a.kv, true, head, a.start, a.rows, s.own_k);
    read_slots(a.kv, false, head, a.start, a.rows, s.own_v);
}

SG_INLINE void point_at_ancestors(AttentionScratch& s, const Attention& a, int row, int64_t begin, int64_t end) {
    const int padded = a.padded();
    for (int64_t j = std::max<int64_t>(begin, a.start); j < end; j++) {
        const int64_t ancestor = a.path[row * a.rows + (j - a.start)];
        s.keys[j - begin] = s.own_k + ancestor * padded;
        s.values[j - begin] = s.own_v + ancestor * padded;
    }
}

// Partials of rows [from, to) × the query heads of kv head `head` over one range; result(row, query) is where to.
template <class Where>
static void attend_range(AttentionScratch& s, const Attention& a, int64_t head, int64_t range, int from, int to,
                         const Where& result) {
    const int group = a.group(), padded = a.padded();
    int64_t first = INT64_MAX, last = -1;
    for (int r = from; r < to; r++) {
        for (int g = 0; g < group; g++) clear_partial(result(r, g), padded);
        first = std::min(first, a.first_key(r));
        last = std::max<int64_t>(last, a.positions[r]);
    }
    const int64_t stop = std::min<int64_t>((range + 1) * RANGE, last + 1);
    for (int64_t begin = range * RANGE; begin < stop; begin += KV_BLOCK) {
        if (begin + KV_BLOCK <= first) continue;
        read_block(s, a, head, begin, first);
        for (int r = from; r < to; r++) {
            const int64_t low = std::max(begin, a.first_key(r));
            const int64_t high = std::min<int64_t>(begin + KV_BLOCK, a.positions[r] + 1);
            if (low >= high) continue;
            if (a.path != nullptr) point_at_ancestors(s, a, r, begin, high);
            fold_row(s, a, head, r, static_cast<int>(low - begin), static_cast<int>(high - begin), result);
        }
    }
}

static void finish_head(const Attention& a, const float* partial, int64_t row, int64_t head) {
    float* out = a.out + (row * a.heads + head) * a.kv.dim;
    const int padded = a.padded();
    const VF inverse = splat(1.0f / partial[padded + 1]);
    for (int i = 0; i < padded; i += L) store_part(out + i, load<VF>(partial + i) * inverse, a.kv.dim - i);
}

// Few rows: (kv head × range) tasks, then (row × head) merges. Many: (row chunk × kv head) tasks that merge as they go.
constexpr int SPLIT_ROWS = 32, CHUNK_ROWS = 16;
constexpr int64_t SPLIT_BYTES = int64_t{64} << 20;

SG_INLINE int64_t split_floats(const Attention& a) { return a.ranges() * a.rows * a.heads * a.partial_size(); }
SG_INLINE bool splits(const Attention& a) { return a.rows <= SPLIT_ROWS && split_floats(a) * 4 <= SPLIT_BYTES; }

static void attention_split(Pool& pool, int thread, const Attention& a, AttentionScratch& s, float* partials) {
    const int64_t tasks = a.kv.kv_heads * a.ranges(), size = a.partial_size();
    auto at = [&](int64_t range, int64_t row, int64_t head) {
        return partials + ((range * a.rows + row) * a.heads + head) * size;
    };
    Share share(tasks, thread, pool.size);
    int64_t own = -1;
    for (int64_t task = share.begin; task < share.end; task++) {
        const int64_t head = task / a.ranges(), range = task % a.ranges();
        if (head != own) read_own_rows(s, a, head);
        own = head;
        attend_range(s, a, head, range, 0, a.rows,
                     [&](int64_t row, int64_t g) { return at(range, row, head * a.group() + g); });
    }
    pool.barrier();
    Share merges(int64_t{a.rows} * a.heads, thread, pool.size);
    for (int64_t i = merges.begin; i < merges.end; i++) {
        float* total = at(0, i / a.heads, i % a.heads);
        for (int64_t range = 1; range < a.ranges(); range++)
            merge_partial(total, at(range, i / a.heads, i % a.heads), a.padded());
        finish_head(a, total, i / a.heads, i % a.heads);
    }
}

static void attention_whole(Pool& pool, int thread, const Attention& a, AttentionScratch& s, float* totals) {
    const int64_t chunks = (a.rows + CHUNK_ROWS - 1) / CHUNK_ROWS, size = a.partial_size(), group = a.group();
    float* partials = totals + CHUNK_ROWS * group * size;
    for (int64_t task = thread; task < chunks * a.kv.kv_heads; task += pool.size) {
        const int64_t head = task % a.kv.kv_heads;
        const int from = static_cast<int>(task / a.kv.kv_heads) * CHUNK_ROWS, to = std::min(from + CHUNK_ROWS, a.rows);
        auto at = [&](float* base, int64_t row, int64_t g) { return base + ((row - from) * group + g) * size; };
        read_own_rows(s, a, head);
        for (int r = from; r < to; r++)
            for (int64_t g = 0; g < group; g++) clear_partial(at(totals, r, g), a.padded());
        for (int64_t range = 0; range < a.ranges(); range++) {
            attend_range(s, a, head, range, from, to, [&](int64_t row, int64_t g) { return at(partials, row, g); });
            for (int r = from; r < to; r++)
                for (int64_t g = 0; g < group; g++) merge_partial(at(totals, r, g), at(partials, r, g), a.padded());
        }
        for (int r = from; r < to; r++)
            for (int64_t g = 0; g < group; g++) finish_head(a, at(totals, r, g), r, head * group + g);
    }
}

SG_INLINE int64_t shared_floats(const Attention& a) { return splits(a) ? split_floats(a) : 0; }

SG_INLINE int64_t thread_floats(const Attention& a) {
    const int64_t whole = splits(a) ? 0 : 2 * CHUNK_ROWS * a.group() * a.partial_size();
    return round_up(AttentionScratch::floats(a) + whole, 16);
}

// On every thread of the pool. shared: shared_floats; own: this thread's thread_floats.
static void attention(Pool& pool, int thread, const Attention& a, float* shared, float* own) {
    AttentionScratch scratch(own, a);
    if (splits(a)) attention_split(pool, thread, a, scratch, shared);
    else attention_whole(pool, thread, a, scratch, own + AttentionScratch::floats(a));
}

SG_INLINE bool is_chain(const int32_t* parents, int rows) {
    for (int r = 0; r < rows; r++)
        if (parents[r] != r - 1) return false;
    return true;
}

// path (rows, rows) from parents; row r's depth is positions[r] - start.
static void fill_path(const int32_t* parents, const int32_t* positions, int rows, int start, int32_t* path) {
    for (int r = 0; r < rows; r++) {
        const int depth = positions[r] - start;
        if (parents[r] >= 0) memcpy(path + r * rows, path + parents[r] * rows, sizeof(int32_t) * static_cast<size_t>(depth));
        path[r * rows + depth] = r;
    }
}
