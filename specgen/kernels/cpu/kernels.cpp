// specgen's CPU kernels: a plain C interface over the headers beside this file. One translation unit, no dependencies.
//
// Roofline, for the design (default model, 2 Zen 3 cores at 3.2 GHz, AVX2, 39 GB/s read by both, so 6 bytes a cycle by
// one): 8 outputs × 32 inputs of int4 are 128 bytes of nibbles + 32 of scales and mins, 27 cycles of memory. Unpacking
// takes 12 µops; each row then takes 8 broadcasts, 8 vpmaddubsw, 8 vpaddw, 1 vpmaddwd, 1 convert, 1 vmulps, 2 vfmadd.
// That is 5 cycles by the ports (two broadcasts and two multiplies a cycle, measured), but the best that a hand-scheduled
// loop of these instructions reached is 7.6, and the compiled kernel 9; 10 where the adds of a row make one long chain. So
// one row (17 cycles) hides behind memory, two too (25), five (48) cost 1.8 × and eight (72) 2.7 ×.
// With vpdpbusd (VNNI) a row takes 8 dots + 5 µops and no widening. Hence: unpack a tile once, then go through the rows,
// all dots before all float adds; accumulate 32 inputs in int16 (AVX2) or int32 (VNNI); leave the order of the float adds
// to the blocks alone, so that a row's bits are the same alone, among others, in prefill, and on any number of threads.
#include <mutex>
#include <new>

#include "attention.h"
#include "linear.h"
#include "plan.h"
#include "sample.h"

namespace {

struct Context {
    explicit Context(int threads) : pool(threads) {}
    Pool pool;
    Scratch shared, threads;
    std::vector<Ranked> ranked;
    std::mutex lock;  // one call at a time: the scratch is shared
};

#if defined(SG_SIMDE)
#define SG_EMULATED " emulated"
#else
#define SG_EMULATED ""
#endif

const char* path_name() {
#if SG_PATH == SG_AVX512_VNNI
    return "avx512 vnni" SG_EMULATED;
#elif SG_PATH == SG_AVX2_VNNI
    return "avx2 vnni" SG_EMULATED;
#elif SG_PATH == SG_AVX2
    return "avx2" SG_EMULATED;
#elif defined(__ARM_FEATURE_DOTPROD)
    return "neon dot";
#else
    return "portable";
#endif
}

}  // namespace

#define SG_EXPORT extern "C" __attribute__((visibility("default")))

SG_EXPORT const char* sg_path() { return path_name(); }
SG_EXPORT int32_t sg_lanes() { return L; }

SG_EXPORT Context* sg_context_new(int32_t threads) {
    try {
        return new Context(threads);
    } catch (...) {  // no thread or memory to be had: the loader says so
        return nullptr;
    }
}

SG_EXPORT void sg_context_free(Context* c) { delete c; }

SG_EXPORT int64_t sg_tile_bytes(const Linear* w) { return tile_bytes_of(*w); }
SG_EXPORT int64_t sg_tiles(const Linear* w) { return tiles_of(*w); }

SG_EXPORT void sg_pack(Context* c, const Linear* w, const void* values, const void* scale, const void* min,
                       int64_t groups, void* out) {
    std::lock_guard guard(c->lock);
    const Source source{static_cast<const uint8_t*>(values), static_cast<const uint8_t*>(scale),
                        static_cast<const uint8_t*>(min), groups};
    pack(c->pool, source, *w, static_cast<uint8_t*>(out));
}

SG_EXPORT void sg_embedding(Context* c, const Linear* w, const int64_t* ids, int64_t rows, float* out) {
    std::lock_guard guard(c->lock);
    for (int64_t r = 0; r < rows; r++) weight_row(*w, ids[r], out + r * w->k);
}

SG_EXPORT void sg_rms_norm(Context* c, const float* x, const float* weight, float eps, int64_t rows, int64_t size,
                           float* out) {
    std::lock_guard guard(c->lock);
    for (int64_t r = 0; r < rows; r++) rms_norm_row(x + r * size, weight, eps, size, out + r * size);
}

SG_EXPORT void sg_linear(Context* c, const Linear* w, const float* x, int64_t rows, float* out) {
    std::lock_guard guard(c->lock);
    Pool& pool = c->pool;
    const Quantised to(c->shared.need<uint8_t>(Quantised::bytes(rows, w->k)), rows, w->k);
    Rows ready = to.rows();
    ready.x = x, ready.stride = w->k;
    const Output output{out, w->n, nullptr, 1.0f};
    pool.run([&](int thread) {
        if (is_integer(*w)) {
            Share share(rows, thread, pool.size);
            for (int64_t r = share.begin; r < share.end; r++) quantise_row(x + r * w->k, w->k, to, r);
            pool.barrier();
        }
        Share share(units_of(*w), thread, pool.size);
        linear_units(*w, share.begin, share.end, ready, rows, output);
    });
}

// q (rows, heads, dim) is rotated in place, k too; k and v (rows, kv_heads, dim) go into the cache. half 0: no rotation.
SG_EXPORT void sg_rope_write(Context* c, float* q, float* k, const float* v, const float* cos, const float* sin,
                             int64_t half, int32_t rows, int32_t heads, const KvView* kv, int32_t start) {
    std::lock_guard guard(c->lock);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t h = 0; h < heads; h++)
            rotate(q + (r * heads + h) * kv->dim, cos + r * half, sin + r * half, half);
        for (int64_t h = 0; h < kv->kv_heads; h++) {
            const int64_t at = (r * kv->kv_heads + h) * kv->dim;
            rotate(k + at, cos + r * half, sin + r * half, half);
            write_slot(*kv, true, h, start + r, k + at);
            write_slot(*kv, false, h, start + r, v + at);
        }
    }
}

SG_EXPORT void sg_attention(Context* c, const float* q, const KvView* kv, const int32_t* parents,
                            const int32_t* positions, int32_t rows, int32_t heads, int32_t start, float scale,
                            float softcap, int32_t window, float* out) {
    std::lock_guard guard(c->lock);
    std::vector<int32_t> path;
    if (!is_chain(parents, rows)) {
        path.resize(static_cast<size_t>(rows) * static_cast<size_t>(rows));
        fill_path(parents, positions, rows, start, path.data());
    }
    const Attention a{q,         out,       *kv, heads, rows, start, positions, path.empty() ? nullptr : path.data(),
                      scale,     softcap,   window};
    Pool& pool = c->pool;
    float* shared = c->shared.need<float>(shared_floats(a));
    float* own = c->threads.need<float>(thread_floats(a) * pool.size);
    pool.run([&](int thread) { attention(pool, thread, a, shared, own + thread * thread_floats(a)); });
}

SG_EXPORT void sg_gated(Context* c, const float* gate, const float* up, int64_t rows, int64_t size, int32_t activation,
                        float* out) {
    std::lock_guard guard(c->lock);
    for (int64_t r = 0; r < rows; r++) gate_row(gate + r * size, up + r * size, out + r * size, size, activation);
}

SG_EXPORT void sg_argmax(Context* c, const float* logits, int64_t rows, int64_t count, int64_t* out) {
    std::lock_guard guard(c->lock);
    for (int64_t r = 0; r < rows; r++) out[r] = argmax_row(logits + r * count, count);
}

SG_EXPORT int64_t sg_gumbel_argmax(Context* c, const float* logits, int64_t count, const Draw* draw) {
    std::lock_guard guard(c->lock);
    return gumbel_argmax(c->pool, logits, count, *draw, c->ranked);
}

SG_EXPORT void sg_step(Context* c, const Plan* plan, const Step* step) {
    std::lock_guard guard(c->lock);
    StepRun(c->pool, *plan, *step, c->shared, c->threads).run();
}

// ---- for measuring ----

// Reads `bytes` with plain vector loads on all threads; returns a sum so that nothing is left out.
SG_EXPORT uint32_t sg_read(Context* c, const uint8_t* data, int64_t bytes) {
    std::lock_guard guard(c->lock);
    std::atomic<uint32_t> total{0};
    c->pool.run([&](int thread) {
        Share share(bytes / 128, thread, c->pool.size);
        VU a{}, b{}, d{}, e{};
        constexpr int STEP = 4 * static_cast<int>(sizeof(VU));
        const uint8_t* end = data + share.end * 128;
        for (const uint8_t* p = data + share.begin * 128; p + STEP <= end; p += STEP) {
            a += load<VU>(p), b += load<VU>(p + sizeof(VU));
            d += load<VU>(p + 2 * sizeof(VU)), e += load<VU>(p + 3 * sizeof(VU));
        }
        a += b + d + e;
        uint32_t sum = 0;
        for (int i = 0; i < L; i++) sum += a[i];
        total += sum;
    });
    return total;
}

// `count` empty runs with one barrier in each.
SG_EXPORT void sg_barriers(Context* c, int64_t count) {
    std::lock_guard guard(c->lock);
    for (int64_t i = 0; i < count; i++) c->pool.run([&](int) { c->pool.barrier(); });
}
