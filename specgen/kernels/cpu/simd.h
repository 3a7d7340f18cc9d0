// The vectors that every kernel is written in, and the few operations that differ between instruction sets.
//
// Knows: one lane count L per path, float/int vectors of L lanes (GCC/Clang vector extensions), and the 4-byte dot
// products. Does not know: layouts, ops. Paths, best first: AVX-512 VNNI (L = 16), AVX2 + VNNI, AVX2, portable (L = 8;
// NEON dot products where the compiler has them). SG_MAX_PATH caps the choice (tests); SG_SIMDE compiles the x86 paths
// over SIMDe's emulation of the intrinsics, so that they can be tested on any machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(SG_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define SG_PORTABLE 0
#define SG_AVX2 1
#define SG_AVX2_VNNI 2
#define SG_AVX512_VNNI 3

#ifndef SG_MAX_PATH
#define SG_MAX_PATH SG_AVX512_VNNI
#endif

#if defined(SG_SIMDE)
#define SG_PATH SG_MAX_PATH
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && SG_MAX_PATH >= 3
#define SG_PATH SG_AVX512_VNNI
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__) && SG_MAX_PATH >= 2
#define SG_PATH SG_AVX2_VNNI
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && SG_MAX_PATH >= 1
#define SG_PATH SG_AVX2
#else
#define SG_PATH SG_PORTABLE
#endif

#define SG_INLINE static inline __attribute__((always_inline))

#if SG_PATH == SG_AVX512_VNNI
constexpr int L = 16;
#else
constexpr int L = 8;
#endif

typedef float VF __attribute__((vector_size(4 * L)));
typedef int32_t VI __attribute__((vector_size(4 * L)));
typedef uint32_t VU __attribute__((vector_size(4 * L)));
typedef uint64_t VU64 __attribute__((vector_size(8 * L)));
typedef double VD __attribute__((vector_size(8 * L)));
typedef uint16_t VH __attribute__((vector_size(2 * L)));
typedef uint8_t VB __attribute__((vector_size(L)));
typedef int8_t VSB __attribute__((vector_size(L)));

template <class T>
SG_INLINE T load(const void* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
SG_INLINE void store(void* to, T value) {
    memcpy(to, &value, sizeof value);
}

template <class To, class From>
SG_INLINE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

SG_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

SG_INLINE VF splat(float x) { return x - VF{}; }
SG_INLINE VI splat(int32_t x) { return x - VI{}; }
SG_INLINE VU splat(uint32_t x) { return x - VU{}; }

SG_INLINE VI lane_numbers() {
    VI lanes;
    for (int i = 0; i < L; i++) lanes[i] = i;
    return lanes;
}

// The first `count` floats (0 in the lanes behind), and the same the other way.
SG_INLINE VF load_part(const float* from, int count) {
    VF value{};
    memcpy(&value, from, sizeof(float) * static_cast<size_t>(count < L ? count : L));
    return value;
}

SG_INLINE void store_part(float* to, VF value, int count) {
    memcpy(to, &value, sizeof(float) * static_cast<size_t>(count < L ? count : L));
}

// a · b + c, rounded once where the machine can (the portable path without FMA hardware rounds twice).
SG_INLINE VF fma(VF a, VF b, VF c) {
#if SG_PATH == SG_AVX512_VNNI
    return bits<VF>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif SG_PATH >= SG_AVX2
    return bits<VF>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(FP_FAST_FMAF)
    VF r;
    for (int i = 0; i < L; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

SG_INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }
SG_INLINE VI vmax(VI a, VI b) { return a > b ? a : b; }
SG_INLINE VF to_float(VI x) { return __builtin_convertvector(x, VF); }

// Round half to even, |x| < 2^22: adding 1.5 · 2^23 leaves the integer in the low bits of the mantissa.
constexpr float ROUND_MAGIC = 12582912.0f;
SG_INLINE VI round_to_int(VF x) { return bits<VI>(x + ROUND_MAGIC) - bits<int32_t>(ROUND_MAGIC); }

SG_INLINE VF from_bf16(const void* from) {
    return bits<VF>(__builtin_convertvector(load<VH>(from), VU) << 16);
}

SG_INLINE VI from_int8(const void* from) {
#if SG_PATH == SG_AVX512_VNNI && !defined(SG_SIMDE)
    return bits<VI>(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif SG_PATH >= SG_AVX2 && SG_PATH != SG_AVX512_VNNI
    return bits<VI>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(load<VSB>(from), VI);
#endif
}

// Round to nearest even; a NaN stays a NaN.
SG_INLINE VH to_bf16(VF x) {
    VU u = bits<VU>(x);
    VU rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    VU nan = (u >> 16) | 0x40u;
    VU result = (x != x) ? nan : rounded;
    return __builtin_convertvector(result, VH);
}

SG_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7FFFu;
    if (rest >= 0x7C00u) return bits<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    // The half's exponent is 112 less than the float's; a multiplication also normalises subnormals, exactly.
    float value = bits<float>(rest << 13) * bits<float>(0x77800000u);  // · 2^112
    return bits<float>(bits<uint32_t>(value) | sign);
}

SG_INLINE VF from_f16(const void* from) {
#if SG_PATH == SG_AVX512_VNNI && !defined(SG_SIMDE)  // which lacks it
    return bits<VF>(_mm512_cvtph_ps(load<__m256i>(from)));
#elif SG_PATH >= SG_AVX2 && SG_PATH != SG_AVX512_VNNI
    return bits<VF>(_mm256_cvtph_ps(load<__m128i>(from)));
#else
    VU half = __builtin_convertvector(load<VH>(from), VU);
    VU rest = half & 0x7FFFu;
    VU finite = bits<VU>(bits<VF>(rest << 13) * bits<float>(0x77800000u));
    VU special = 0x7F800000u | (rest & 0x3FFu) << 13;
    return bits<VF>((rest >= 0x7C00u ? special : finite) | (half & 0x8000u) << 16);
#endif
}

// x, as something in a register whose making the compiler knows nothing of. GCC makes one long chain of any tree of integer
// adds, which keeps the core from starting the next row, and reads a value again and again that memory also holds.
template <class V>
SG_INLINE V opaque(V x) {
#if SG_PATH >= SG_AVX2 && !defined(SG_SIMDE)
    asm("" : "+v"(x));
#endif
    return x;
}

// Sums across lanes in a fixed tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
SG_INLINE float sum_lanes(VF x) {
    float lane[L];
    store(lane, x);
    for (int width = L / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

template <class T, class V>
SG_INLINE T max_lanes(V x) {
    T best = x[0];
    for (int i = 1; i < L; i++) best = x[i] > best ? static_cast<T>(x[i]) : best;
    return best;
}

template <int B, bool HIGH, size_t... I>
SG_INLINE VF gather_halves(VF a, VF b, std::index_sequence<I...>) {
    constexpr auto source = [](int lane) {
        int block = lane / B, within = lane % B;
        return (within / (B / 2)) * L + block * B + within % (B / 2) + (HIGH ? B / 2 : 0);
    };
    return __builtin_shufflevector(a, b, source(I)...);
}

template <int B>
SG_INLINE VF add_halves(VF a, VF b) {
    using Lanes = std::make_index_sequence<L>;
    return gather_halves<B, false>(a, b, Lanes{}) + gather_halves<B, true>(a, b, Lanes{});
}

// L vectors → one: lane i holds the sum of vector i's lanes, each in the tree of `sum_lanes`.
SG_INLINE VF sum_each(VF* v) {
#if SG_PATH == SG_AVX512_VNNI
    for (int i = 0; i < 8; i++) v[i] = add_halves<16>(v[i], v[i + 8]);
#endif
    for (int i = 0; i < 4; i++) v[i] = add_halves<8>(v[i], v[i + 4]);
    for (int i = 0; i < 2; i++) v[i] = add_halves<4>(v[i], v[i + 2]);
    return add_halves<2>(v[0], v[1]);
}

// e^x: Cephes' expf polynomial; about 1 ulp. Below -87.3 it is 0, above 88 it stays at e^88, a NaN stays a NaN.
SG_INLINE VF vexp(VF x) {
    VI dead = x < -87.3f;
    x = x > 88.0f ? splat(88.0f) : x;
    x = dead ? VF{} : x;
    VF n = x * 1.44269504088896341f + ROUND_MAGIC;
    VI exponent = bits<VI>(n) - bits<int32_t>(ROUND_MAGIC);
    n -= ROUND_MAGIC;
    VF r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    VF p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    // Through unsigned: a NaN's exponent is rubbish, and shifting or adding it must not be undefined.
    VF power = bits<VF>((bits<VU>(exponent) + 127u) << 23);
    VF result = p * power;
    result = x != x ? x : result;
    return dead ? VF{} : result;
}

// e^x for x ≤ 0 in double, to a few ulp: Taylor's series on |r| ≤ ln 2 / 2. Below -700 it is 0.
SG_INLINE VD vexp(VD x) {
    constexpr double MAGIC = 0x1.8p52;  // leaves the nearest integer in the low bits
    VD n = x * 1.4426950408889634 + MAGIC;
    const VU64 exponent = bits<VU64>(n) - bits<uint64_t>(MAGIC);
    n -= MAGIC;
    const VD r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    constexpr double C[14] = {1.0,         1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
                              1.0 / 120,   1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                              1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    VD even = VD{} + C[12], odd = VD{} + C[13];
    for (int i = 10; i >= 0; i -= 2) even = even * (r * r) + C[i], odd = odd * (r * r) + C[i + 1];
    return x < -700.0 ? VD{} : (odd * r + even) * bits<VD>((exponent + 1023u) << 52);
}

SG_INLINE VF vtanh(VF x) { return 1.0f - 2.0f / (vexp(x + x) + 1.0f); }

// log(x), x > 0 and normal: Cephes' logf polynomial.
SG_INLINE VF vlog(VF x) {
    VI u = bits<VI>(x);
    VI exponent = ((u >> 23) & 0xFF) - 126;
    VF m = bits<VF>((u & 0x007FFFFF) | 0x3F000000);  // [0.5, 1)
    VI small = m < 0.707106781186547524f;
    exponent = small ? exponent - 1 : exponent;
    m = small ? m + m - 1.0f : m - 1.0f;
    VF e = to_float(exponent), z = m * m;
    VF p = fma(splat(7.0376836292e-2f), m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    VF y = p * m * z;
    y = fma(e, splat(-2.12194440e-4f), y);
    y = fma(z, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), m + y);
}

// ---- dot products of 4 bytes in each of L lanes ----
//
// Dot4: weights 0…15 (unsigned) · x (-127…127). Dot8: weights -128…127 · x. Both sum exactly: the result does not
// depend on the path. `of` takes STEPS vectors of L · 4 weight bytes and the 4 · STEPS activations that every lane shares
// (STEPS · 4 ≤ 32), with their sum.

#if SG_PATH == SG_AVX512_VNNI
typedef __m512i Bytes;
SG_INLINE Bytes load_bytes(const uint8_t* p) { return load<__m512i>(p); }
SG_INLINE Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
SG_INLINE Bytes high_nibbles(Bytes b) {
    return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15));
}
SG_INLINE Bytes splat4(const int8_t* x) { return _mm512_set1_epi32(load<int32_t>(x)); }
#elif SG_PATH >= SG_AVX2
typedef __m256i Bytes;
SG_INLINE Bytes load_bytes(const uint8_t* p) { return load<__m256i>(p); }
SG_INLINE Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
SG_INLINE Bytes high_nibbles(Bytes b) {
    return _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(15));
}
SG_INLINE Bytes splat4(const int8_t* x) { return _mm256_set1_epi32(load<int32_t>(x)); }
#endif

#if SG_PATH == SG_AVX512_VNNI || SG_PATH == SG_AVX2_VNNI

SG_INLINE Bytes dot_bytes(Bytes acc, Bytes u8, Bytes s8) {
#if SG_PATH == SG_AVX512_VNNI
    return _mm512_dpbusd_epi32(acc, u8, s8);
#elif defined(SG_SIMDE)
    return _mm256_dpbusd_epi32(acc, u8, s8);
#else
    return _mm256_dpbusd_avx_epi32(acc, u8, s8);
#endif
}

struct Dot4 {
    SG_INLINE Bytes prepare(Bytes w) { return w; }
    template <int STEPS>
    SG_INLINE VI of(const Bytes (&w)[STEPS], const int8_t* x, int32_t) {
        Bytes acc = bits<Bytes>(VI{});
        for (int i = 0; i < STEPS; i++) acc = dot_bytes(acc, w[i], splat4(x + 4 * i));
        return bits<VI>(acc);
    }
};

// dpbusd wants unsigned weights: w + 128, and 128 · Σx is taken off at the end.
struct Dot8 {
    SG_INLINE Bytes prepare(Bytes w) { return bits<Bytes>(bits<VU>(w) ^ 0x80808080u); }
    template <int STEPS>
    SG_INLINE VI of(const Bytes (&w)[STEPS], const int8_t* x, int32_t x_sum) {
        return Dot4::of(w, x, x_sum) - 128 * x_sum;
    }
};

#elif SG_PATH == SG_AVX2

// |pair sums| ≤ 2 · 15 · 127 = 3810, so 8 of them fit an int16: one widening per 32 inputs.
struct Dot4 {
    SG_INLINE Bytes prepare(Bytes w) { return w; }
    template <int STEPS>
    SG_INLINE VI of(const Bytes (&w)[STEPS], const int8_t* x, int32_t) {
        __m256i acc{};
        for (int i = 0; i < STEPS; i += 2) {
            const __m256i a = _mm256_maddubs_epi16(w[i], splat4(x + 4 * i));
            const __m256i b = _mm256_maddubs_epi16(w[i + 1], splat4(x + 4 * i + 4));
            const __m256i both = opaque(_mm256_add_epi16(a, b));
            acc = i == 0 ? both : _mm256_add_epi16(acc, both);
        }
        return bits<VI>(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
    }
};

// |w| · (sign(w) x): |pair sums| ≤ 2 · 128 · 127 = 32512 fit an int16, but only one of them.
struct Dot8 {
    SG_INLINE Bytes prepare(Bytes w) { return w; }
    template <int STEPS>
    SG_INLINE VI of(const Bytes (&w)[STEPS], const int8_t* x, int32_t) {
        __m256i acc{};
        for (int i = 0; i < STEPS; i += 2) {
            const __m256i both = opaque(_mm256_add_epi32(four(w[i], x + 4 * i), four(w[i + 1], x + 4 * i + 4)));
            acc = i == 0 ? both : _mm256_add_epi32(acc, both);
        }
        return bits<VI>(acc);
    }

  private:
    SG_INLINE __m256i four(Bytes w, const int8_t* x) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(splat4(x), w));
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
};

#else

typedef uint8_t Bytes __attribute__((vector_size(4 * L)));
SG_INLINE Bytes load_bytes(const uint8_t* p) { return load<Bytes>(p); }
SG_INLINE Bytes low_nibbles(Bytes b) { return b & 15; }
SG_INLINE Bytes high_nibbles(Bytes b) { return b >> 4; }

SG_INLINE VI dot_signed(VI acc, Bytes w, const int8_t* x) {
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t shared = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(x)));
    int8x16_t half[2];
    int32x4_t total[2];
    memcpy(half, &w, sizeof w);
    memcpy(total, &acc, sizeof acc);
    total[0] = vdotq_s32(total[0], half[0], shared);
    total[1] = vdotq_s32(total[1], half[1], shared);
    memcpy(&acc, total, sizeof acc);
#else
    int8_t lanes[4 * L];
    memcpy(lanes, &w, sizeof w);
    for (int i = 0; i < L; i++)
        acc[i] += lanes[4 * i] * x[0] + lanes[4 * i + 1] * x[1] + lanes[4 * i + 2] * x[2] + lanes[4 * i + 3] * x[3];
#endif
    return acc;
}

struct Dot8 {
    SG_INLINE Bytes prepare(Bytes w) { return w; }
    template <int STEPS>
    SG_INLINE VI of(const Bytes (&w)[STEPS], const int8_t* x, int32_t) {
        VI acc{};
        for (int i = 0; i < STEPS; i++) acc = dot_signed(acc, w[i], x + 4 * i);
        return acc;
    }
};
typedef Dot8 Dot4;  // 0…15 is the same signed or not

#endif

// table[i] for 16 floats; index lanes are 0…15.
SG_INLINE VF lookup16(const float* table, VI index) {
#if SG_PATH == SG_AVX512_VNNI
    return bits<VF>(_mm512_permutexvar_ps(bits<__m512i>(index), load<__m512>(table)));
#elif SG_PATH >= SG_AVX2
    __m256 low = _mm256_permutevar8x32_ps(load<__m256>(table), bits<__m256i>(index));
    __m256 high = _mm256_permutevar8x32_ps(load<__m256>(table + 8), bits<__m256i>(index));
    return index > 7 ? bits<VF>(high) : bits<VF>(low);
#else
    VF r;
    for (int i = 0; i < L; i++) r[i] = table[index[i]];
    return r;
#endif
}
