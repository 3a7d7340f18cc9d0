// y = x Wᵀ over packed weights: layouts, packing, activation quantisation, and the kernels of one tile of L outputs.
//
// Integer kinds (INT4, INT8): activations are quantised to int8 per row and 32 inputs; a tile of L outputs holds, for
// each weight group, [L scales][L mins] and then, per 32 inputs (16 for groups of 16), the L · 4 bytes of each 4 inputs
// (INT4: low nibbles inputs 8j…8j+3, high nibbles 8j+4…8j+7). Every row's sum is
//     acc = fma(min, x_scale · Σq, acc); acc = fma(scale · x_scale, dot, acc)      in the order of the blocks,
// so its bits depend on nothing but the row and the weights.
//
// Float kinds (everything else): 64 inputs of a tile are decoded to float once, then each row adds them in four
// interleaved sums (input k goes to sum k % 4), combined as (0 + 1) + (2 + 3) at the end.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pool.h"
#include "simd.h"

enum Kind : int32_t { INT4, INT8, DENSE_F32, DENSE_F16, DENSE_BF16, FP8, CODE4, INT4_ANY, INT8_ANY };

constexpr int BLOCK = 32;      // inputs per activation scale
constexpr int CHUNK = 64;      // inputs that the float kinds decode at once
constexpr int ROWS_MAX = 8;    // rows that share one pass over a tile
constexpr int UNIT = 32;       // outputs that a thread takes at once
constexpr int TILES = UNIT / L;
constexpr int AHEAD = 2048;    // bytes of weights asked for in advance: worth 5 % at one row

// A prepared weight. Mirrored by library.Linear; Python owns the memory.
struct Linear {
    int32_t kind, n, k, k_pad;
    int32_t group;        // inputs per scale (padded: at most k_pad)
    int32_t scale_f32;    // integer kinds: scales and mins are float32, else float16
    int32_t has_min, spare;
    int64_t tile_bytes;
    const uint8_t* data;  // ceil(n / L) tiles
    const float* bias;    // n, or null
    const float* code;    // 16, CODE4
};

SG_INLINE bool is_integer(const Linear& w) { return w.kind == INT4 || w.kind == INT8; }
SG_INLINE int64_t tiles_of(const Linear& w) { return (w.n + L - 1) / L; }
SG_INLINE int64_t units_of(const Linear& w) { return (w.n + UNIT - 1) / UNIT; }

// Bytes of one tile's part that follows one scale: scale, min, values.
SG_INLINE int64_t group_bytes(const Linear& w) {
    bool nibbles = w.kind == INT4 || w.kind == CODE4 || w.kind == INT4_ANY;
    int64_t scales = (w.scale_f32 ? 4 : 2) * (w.has_min ? 2 : 1);
    return L * (scales + (nibbles ? w.group / 2 : w.group));
}

SG_INLINE int64_t tile_bytes_of(const Linear& w) {
    switch (w.kind) {
        case DENSE_F32: return int64_t{4} * L * w.k;
        case DENSE_F16:
        case DENSE_BF16: return int64_t{2} * L * w.k;
        default: return w.k_pad / w.group * group_bytes(w);
    }
}

// ---- packing ----

// Where the files' arrays lie; rows are contiguous.
struct Source {
    const uint8_t* values;  // (n, k) elements, (n, k / 2) bytes for nibbles
    const uint8_t* scale;   // (n, groups)
    const uint8_t* min;     // (n, groups) or null
    int64_t groups;         // per output
};

SG_INLINE int nibble_of(const Source& s, const Linear& w, int64_t n, int64_t k) {
    if (n >= w.n || k >= w.k) return 0;
    int byte = s.values[n * (w.k / 2) + k / 2];
    return k & 1 ? byte >> 4 : byte & 15;
}

SG_INLINE uint8_t byte_of(const Source& s, const Linear& w, int64_t n, int64_t k) {
    return n < w.n && k < w.k ? s.values[n * w.k + k] : 0;
}

static uint8_t* pack_scales(const Source& s, const Linear& w, int64_t tile, int64_t group, uint8_t* out) {
    const int size = w.scale_f32 ? 4 : 2;
    for (const uint8_t* from : {s.scale, s.min}) {
        if (from == nullptr) continue;
        for (int lane = 0; lane < L; lane++, out += size) {
            int64_t n = tile * L + lane;
            if (n < w.n) memcpy(out, from + (n * s.groups + group) * size, static_cast<size_t>(size));
            else memset(out, 0, static_cast<size_t>(size));
        }
    }
    return out;
}

static void pack_integer_tile(const Source& s, const Linear& w, int64_t tile, uint8_t* out) {
    for (int64_t begin = 0; begin < w.k_pad; begin += w.group) {
        out = pack_scales(s, w, tile, begin / w.group, out);
        const int step = w.kind == INT4 ? 8 : 4;
        for (int64_t k = begin; k < begin + w.group; k += step)
            for (int64_t n = tile * L; n < tile * L + L; n++)
                for (int i = 0; i < 4; i++) {
                    if (w.kind == INT8) *out++ = byte_of(s, w, n, k + i);
                    else *out++ = static_cast<uint8_t>(nibble_of(s, w, n, k + i) | nibble_of(s, w, n, k + 4 + i) << 4);
                }
    }
}

// Float kinds with scales: per group [L scales (mins)], then per input (per two for nibbles) L bytes.
static void pack_scaled_tile(const Source& s, const Linear& w, int64_t tile, uint8_t* out) {
    const bool nibbles = w.kind == CODE4 || w.kind == INT4_ANY;
    for (int64_t begin = 0; begin < w.k_pad; begin += w.group) {
        out = pack_scales(s, w, tile, begin / w.group, out);
        for (int64_t k = begin; k < begin + w.group; k += nibbles ? 2 : 1)
            for (int64_t n = tile * L; n < tile * L + L; n++) {
                if (!nibbles) *out++ = byte_of(s, w, n, k);
                else *out++ = static_cast<uint8_t>(nibble_of(s, w, n, k) | nibble_of(s, w, n, k + 1) << 4);
            }
    }
}

static void pack_dense_tile(const Source& s, const Linear& w, int64_t tile, uint8_t* out) {
    const int64_t size = w.kind == DENSE_F32 ? 4 : 2;
    for (int64_t k = 0; k < w.k; k++)
        for (int64_t n = tile * L; n < tile * L + L; n++, out += size) {
            if (n < w.n) memcpy(out, s.values + (n * w.k + k) * size, static_cast<size_t>(size));
            else memset(out, 0, static_cast<size_t>(size));
        }
}

static void pack(Pool& pool, const Source& s, const Linear& w, uint8_t* out) {
    pool.run([&](int thread) {
        Share share(tiles_of(w), thread, pool.size);
        for (int64_t tile = share.begin; tile < share.end; tile++) {
            uint8_t* to = out + tile * w.tile_bytes;
            if (is_integer(w)) pack_integer_tile(s, w, tile, to);
            else if (w.kind <= DENSE_BF16) pack_dense_tile(s, w, tile, to);
            else pack_scaled_tile(s, w, tile, to);
        }
    });
}

// ---- activations ----

// Rows that go through a tile together: as even as possible, at most ROWS_MAX.
struct Chunks {
    int64_t rows, size;
    explicit Chunks(int64_t all) : rows(all) {
        const int64_t count = (all + ROWS_MAX - 1) / ROWS_MAX;
        size = (all + count - 1) / count;
    }
    int count_at(int64_t first) const { return static_cast<int>(rows - first < size ? rows - first : size); }
};

// Rows of activations ready for a weight: as they are for float kinds; for integer kinds quantised, the rows of a chunk
// side by side, block after block, so that a kernel for a fixed number of rows finds everything at fixed distances.
struct Rows {
    const float* x;        // (rows, stride)
    int64_t stride;
    const int8_t* q;       // per chunk (blocks, rows of the chunk, 32)
    const float* scale;    // per chunk (blocks, rows of the chunk)
    const float* sum;      // scale · Σq
    const int32_t* q_sum;  // Σq of the block's first and second half
    int64_t blocks;

    // The same, beginning with a chunk's first row.
    Rows from(int64_t row) const {
        const int64_t at = row * blocks;
        return {x + row * stride, stride, q + at * BLOCK, scale + at, sum + at, q_sum + 2 * at, blocks};
    }
};

// Memory of quantised rows, cut from one buffer.
struct Quantised {
    int8_t* q;
    float *scale, *sum;
    int32_t* q_sum;
    int64_t blocks;
    Chunks chunks;

    static int64_t bytes(int64_t rows, int64_t k) { return rows * (k + BLOCK - 1) / BLOCK * (BLOCK + 16) + rows * 64; }

    Quantised(uint8_t* at, int64_t rows, int64_t k) : blocks((k + BLOCK - 1) / BLOCK), chunks(rows) {
        const int64_t all = rows * blocks;
        q = reinterpret_cast<int8_t*>(at);
        scale = reinterpret_cast<float*>(at + all * BLOCK);
        sum = scale + all;
        q_sum = reinterpret_cast<int32_t*>(sum + all);
    }

    Rows rows() const { return {nullptr, 0, q, scale, sum, q_sum, blocks}; }
};

// Nothing smaller is worth a scale: 127 / amax must not overflow.
constexpr float TINY = 1e-30f;

SG_INLINE void quantise_block(const float* x, int count, int8_t* q, float* scale, float* sum, int32_t* q_sum) {
    VF v[BLOCK / L];
    VI largest{};
    for (int i = 0; i < BLOCK / L; i++) {
        v[i] = count == BLOCK ? load<VF>(x + i * L) : load_part(x + i * L, count > i * L ? count - i * L : 0);
        // As integers, |x| sorts a NaN above infinity above every number: none is lost.
        largest = vmax(largest, bits<VI>(v[i]) & 0x7FFFFFFF);
    }
    const int32_t top = max_lanes<int32_t>(largest);
    const float amax = bits<float>(top);
    if (top >= 0x7F800000 || amax < TINY) {
        memset(q, 0, BLOCK);
        *scale = *sum = top >= 0x7F800000 ? NAN : 0.0f;
        q_sum[0] = q_sum[1] = 0;
        return;
    }
    const float inverse = 127.0f / amax;
    VI half[2] = {};
    for (int i = 0; i < BLOCK / L; i++) {
        VI n = round_to_int(v[i] * inverse);
        half[2 * i * L / BLOCK] += n;
        store(q + i * L, __builtin_convertvector(n, VSB));
    }
    q_sum[0] = q_sum[1] = 0;
    for (int i = 0; i < L; i++) q_sum[0] += half[0][i], q_sum[1] += half[1][i];
    *scale = amax * (1.0f / 127.0f);
    *sum = *scale * static_cast<float>(q_sum[0] + q_sum[1]);
}

static void quantise_row(const float* x, int64_t k, const Quantised& to, int64_t row) {
    const int64_t first = row / to.chunks.size * to.chunks.size, together = to.chunks.count_at(first);
    for (int64_t b = 0; b < to.blocks; b++) {
        const int64_t left = k - b * BLOCK, at = first * to.blocks + b * together + row - first;
        quantise_block(x + b * BLOCK, static_cast<int>(left < BLOCK ? left : BLOCK), to.q + at * BLOCK, to.scale + at,
                       to.sum + at, to.q_sum + 2 * at);
    }
}

// ---- one tile, integer kinds ----

template <bool F32>
SG_INLINE VF load_scale(const uint8_t* p) {
    if constexpr (F32) return load<VF>(p);
    else return from_f16(p);
}

template <class Dot, int STEPS>
SG_INLINE void load_weights(const uint8_t* p, Bytes (&w)[STEPS]) {
    for (int i = 0; i < STEPS; i++) w[i] = Dot::prepare(load_bytes(p + i * 4 * L));
}

template <int STEPS>
SG_INLINE void load_nibbles(const uint8_t* p, Bytes (&w)[STEPS]) {
    for (int i = 0; i < STEPS / 2; i++) {
        Bytes both = load_bytes(p + i * 4 * L);
        w[2 * i] = low_nibbles(both);
        w[2 * i + 1] = high_nibbles(both);
    }
}

// One block of weights (STEPS · 4 inputs, already unpacked) for ROWS rows; `at` is the block's first row, `part` the half
// of the block where it is half a block. First all dots, then all float adds: in this order no row's chain of dependent
// operations keeps the next row's out of the core's scheduler.
template <class Dot, bool MIN, int STEPS, int ROWS>
SG_INLINE void add_block(VF* acc, const Bytes (&w)[STEPS], VF scale, VF low, const Rows& x, int64_t at, int part) {
    constexpr bool HALF = STEPS * 4 < BLOCK;
    const int8_t* q = x.q + at * BLOCK + part * STEPS * 4;
    const int32_t* q_sum = x.q_sum + 2 * at + part;
    VI dots[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const int32_t sum = HALF ? q_sum[2 * r] : q_sum[2 * r] + q_sum[2 * r + 1];
        dots[r] = Dot::of(w, q + r * BLOCK, sum);
    }
    for (int r = 0; r < ROWS; r++) {
        const float x_scale = x.scale[at + r];
        if constexpr (MIN) {
            const float sum = HALF ? x_scale * static_cast<float>(q_sum[2 * r]) : x.sum[at + r];
            acc[r] = fma(low, splat(sum), acc[r]);
        }
        acc[r] = fma(scale * x_scale, to_float(dots[r]), acc[r]);
    }
}

// acc[0…rows) of one chunk for the tile at p. ROWS fixes the number of rows (0: it is `rows`).
template <int KIND, bool MIN, bool F32, int STEPS, int ROWS>
static void integer_tile(const Linear& w, const uint8_t* p, const Rows& x, int rows, VF* out) {
    using Dot = std::conditional_t<KIND == INT4, Dot4, Dot8>;
    constexpr int SCALE = L * (F32 ? 4 : 2), VALUES = 4 * L * STEPS / (KIND == INT4 ? 2 : 1);
    const int count = ROWS ? ROWS : rows;
    VF acc[ROWS ? ROWS : ROWS_MAX];
    for (int r = 0; r < count; r++) acc[r] = VF{};
    for (uint32_t k = 0; k < static_cast<uint32_t>(w.k_pad);) {
        const VF scale = load_scale<F32>(p);
        const VF low = MIN ? load_scale<F32>(p + SCALE) : VF{};
        p += MIN ? 2 * SCALE : SCALE;
        for (const uint32_t end = k + static_cast<uint32_t>(w.group); k < end; k += STEPS * 4, p += VALUES) {
            for (int i = 0; i < VALUES; i += 64) __builtin_prefetch(p + AHEAD + i);
            Bytes values[STEPS];
            if constexpr (KIND == INT4) load_nibbles<STEPS>(p, values);
            else load_weights<Dot, STEPS>(p, values);
            const int64_t at = k / BLOCK * static_cast<uint32_t>(count);
            const int part = STEPS * 4 < BLOCK ? k / (STEPS * 4) & 1 : 0;
            if constexpr (ROWS > 0) add_block<Dot, MIN, STEPS, ROWS>(acc, values, scale, low, x, at, part);
            else
                for (int r = 0; r < count; r++)
                    add_block<Dot, MIN, STEPS, 1>(acc + r, values, scale, low, x, at + r, part);
        }
    }
    for (int r = 0; r < count; r++) out[r] = acc[r];
}

using TileFn = void (*)(const Linear&, const uint8_t*, const Rows&, int, VF*);

// A kernel for each number of rows where speed matters most: the formats of most files, every path's memory permitting.
template <int KIND, bool MIN, bool F32, size_t... R>
static TileFn fixed_rows(int rows, std::index_sequence<R...>) {
    static constexpr TileFn table[] = {integer_tile<KIND, MIN, F32, 8, static_cast<int>(R) + 1>...};
    return table[rows - 1];
}

static TileFn integer_kernel(const Linear& w, int rows) {
    using All = std::make_index_sequence<ROWS_MAX>;
    if (w.kind == INT4)
        return w.scale_f32 ? fixed_rows<INT4, true, true>(rows, All{}) : fixed_rows<INT4, true, false>(rows, All{});
    if (w.group % BLOCK == 0) {
        if (w.has_min) return w.scale_f32 ? integer_tile<INT8, true, true, 8, 0> : integer_tile<INT8, true, false, 8, 0>;
        return w.scale_f32 ? integer_tile<INT8, false, true, 8, 0> : fixed_rows<INT8, false, false>(rows, All{});
    }
    if (w.has_min) return w.scale_f32 ? integer_tile<INT8, true, true, 4, 0> : integer_tile<INT8, true, false, 4, 0>;
    return w.scale_f32 ? integer_tile<INT8, false, true, 4, 0> : integer_tile<INT8, false, false, 4, 0>;
}

// ---- one tile, float kinds ----

SG_INLINE VF from_e4m3(const uint8_t* p) {
    VU u = __builtin_convertvector(load<VB>(p), VU);
    // As a half, e4m3's exponent is too small by 8; subnormals come out exactly, 0x7F is NaN.
    VH half = __builtin_convertvector((u & 0x7Fu) << 7 | (u & 0x80u) << 8, VH);
    VF value = from_f16(&half) * 256.0f;
    return (u & 0x7Fu) == 0x7Fu ? splat(NAN) : value;
}

// Inputs k … k + count - 1 (count ≤ CHUNK) of the tile at p as floats, L per input.
static void decode_dense(const Linear& w, const uint8_t* p, int64_t k, int count, VF* out) {
    const int64_t size = w.kind == DENSE_F32 ? 4 : 2;
    p += k * L * size;
    for (int i = 0; i < count; i++, p += L * size)
        out[i] = w.kind == DENSE_F32 ? load<VF>(p) : w.kind == DENSE_F16 ? from_f16(p) : from_bf16(p);
}

static void decode_scaled(const Linear& w, const uint8_t* p, int64_t k, int count, VF* out) {
    const bool nibbles = w.kind == CODE4 || w.kind == INT4_ANY;
    const int64_t bytes = group_bytes(w), head = L * 4 * (w.has_min ? 2 : 1);
    VF scale{}, low{};
    int64_t group = -1;
    for (int i = 0; i < count; i++, k++) {
        const uint8_t* at = p + k / w.group * bytes;
        if (k / w.group != group) {
            group = k / w.group;
            scale = load<VF>(at);
            if (w.has_min) low = load<VF>(at + 4 * L);
        }
        const int64_t within = k % w.group;
        at += head + (nibbles ? within / 2 : within) * L;
        if (w.kind == FP8) {
            out[i] = from_e4m3(at) * scale;
            continue;
        }
        if (w.kind == INT8_ANY) {
            out[i] = to_float(from_int8(at)) * scale + low;
            continue;
        }
        VI q = __builtin_convertvector(load<VB>(at), VI);
        q = within & 1 ? q >> 4 : q & 15;
        out[i] = (w.kind == CODE4 ? lookup16(w.code, q) : to_float(q)) * scale;
        if (w.kind == INT4_ANY) out[i] += low;
    }
}

SG_INLINE void decode(const Linear& w, const uint8_t* p, int64_t k, int count, VF* out) {
    if (w.kind <= DENSE_BF16) decode_dense(w, p, k, count, out);
    else decode_scaled(w, p, k, count, out);
}

static void float_tile(const Linear& w, const uint8_t* p, const Rows& x, int rows, VF* acc) {
    VF weights[CHUNK], sums[ROWS_MAX][4] = {};
    for (int64_t k = 0; k < w.k; k += CHUNK) {
        const int count = static_cast<int>(w.k - k < CHUNK ? w.k - k : CHUNK);
        decode(w, p, k, count, weights);
        for (int r = 0; r < rows; r++) {
            const float* at = x.x + r * x.stride + k;
            VF s0 = sums[r][0], s1 = sums[r][1], s2 = sums[r][2], s3 = sums[r][3];
            int i = 0;
            for (; i + 4 <= count; i += 4) {
                s0 = fma(weights[i], splat(at[i]), s0);
                s1 = fma(weights[i + 1], splat(at[i + 1]), s1);
                s2 = fma(weights[i + 2], splat(at[i + 2]), s2);
                s3 = fma(weights[i + 3], splat(at[i + 3]), s3);
            }
            sums[r][0] = s0, sums[r][1] = s1, sums[r][2] = s2, sums[r][3] = s3;
            for (; i < count; i++) sums[r][i & 3] = fma(weights[i], splat(at[i]), sums[r][i & 3]);
        }
    }
    for (int r = 0; r < rows; r++) acc[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

// ---- whole linears ----

// The kernel of a weight for chunks of `rows` rows.
struct TileKernel {
    TileFn run;
    int rows;
    TileKernel(const Linear& w, int count) : run(is_integer(w) ? integer_kernel(w, count) : float_tile), rows(count) {}

    // acc[r] = row r of the chunk, for one tile, bias included.
    void operator()(const Linear& w, int64_t tile, const Rows& chunk, VF* acc) const {
        run(w, w.data + tile * w.tile_bytes, chunk, rows, acc);
        if (w.bias == nullptr) return;
        const VF bias = load_part(w.bias + tile * L, static_cast<int>(w.n - tile * L));
        for (int r = 0; r < rows; r++) acc[r] += bias;
    }
};

// Where results go: out = y, or residual + factor · y.
struct Output {
    float* out;
    int64_t stride;
    const float* residual;  // same stride, or null
    float factor;

    SG_INLINE void put_one(float* to, const float* from, VF y, float factor, int count) {
        if (from != nullptr) {
            VF base = count >= L ? load<VF>(from) : load_part(from, count);
            y = base + (factor == 1.0f ? y : y * factor);
        }
        if (count >= L) store(to, y);
        else store_part(to, y, count);
    }

    void put(int64_t row, int64_t n, VF y, int64_t outputs) const {
        const int64_t at = row * stride + n;
        put_one(out + at, residual == nullptr ? nullptr : residual + at, y, factor, static_cast<int>(outputs - n));
    }
};

// Units [begin, end) of w for all rows.
static void linear_units(const Linear& w, int64_t begin, int64_t end, const Rows& x, int64_t rows, const Output& to) {
    const Chunks chunks(rows);
    VF acc[ROWS_MAX];
    for (int64_t unit = begin; unit < end; unit++)
        for (int64_t row = 0; row < rows; row += chunks.size) {
            const TileKernel kernel(w, chunks.count_at(row));
            const Rows chunk = x.from(row);
            const int64_t last = std::min((unit + 1) * TILES, tiles_of(w));
            for (int64_t tile = unit * TILES; tile < last; tile++) {
                kernel(w, tile, chunk, acc);
                for (int r = 0; r < kernel.rows; r++) to.put(row + r, tile * L, acc[r], w.n);
            }
        }
}

// One row of the weight as floats: the embedding.
static void weight_row(const Linear& w, int64_t n, float* out) {
    const uint8_t* p = w.data + n / L * w.tile_bytes;
    const int64_t lane = n % L;
    if (!is_integer(w)) {
        VF values[CHUNK];
        for (int64_t k = 0; k < w.k; k += CHUNK) {
            const int count = static_cast<int>(w.k - k < CHUNK ? w.k - k : CHUNK);
            decode(w, p, k, count, values);
            for (int i = 0; i < count; i++) out[k + i] = values[i][lane];
        }
        return;
    }
    const int64_t size = w.scale_f32 ? 4 : 2, head = L * size * (w.has_min ? 2 : 1), bytes = group_bytes(w);
    for (int64_t k = 0; k < w.k; k++) {
        const uint8_t* at = p + k / w.group * bytes;
        auto number = [&](const uint8_t* from) {
            return w.scale_f32 ? load<float>(from) : half_to_float(load<uint16_t>(from));
        };
        const float scale = number(at + lane * size), low = w.has_min ? number(at + (L + lane) * size) : 0.0f;
        const int64_t within = k % w.group;
        at += head;
        int q;
        if (w.kind == INT4) {
            const int byte = at[(within / 8 * L + lane) * 4 + within % 4];
            q = within % 8 < 4 ? byte & 15 : byte >> 4;
        } else {
            q = static_cast<int8_t>(at[(within / 4 * L + lane) * 4 + within % 4]);
        }
        const float value = static_cast<float>(q) * scale;
        out[k] = w.has_min ? value + low : value;
    }
}
