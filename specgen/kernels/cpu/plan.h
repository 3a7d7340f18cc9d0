// A whole decoding step in one call: the ops of model/decoder.py in its order, on all threads, with barriers between.
//
// Knows: which ops may share a pass (norm and quantisation, q/k/v, gate/up with the activation, the residual adds) and
// that the results are bit for bit those of the ops called one by one. Does not know: lengths, noise.
#pragma once

#include "attention.h"
#include "linear.h"
#include "sample.h"

enum QkNorm : int32_t { NO_QK_NORM, PER_HEAD, PER_PROJECTION };

// Mirrored by library.PlanLayer. Norms may be null.
struct PlanLayer {
    const Linear *q, *k, *v, *o, *gate, *up, *down;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *q_norm, *k_norm;
    int32_t window;  // 0: none
    int32_t rope;    // which of the angles, -1: none
};

// Mirrored by library.Plan.
struct Plan {
    int32_t hidden, intermediate, heads, kv_heads, dim, layer_count, activation, qk_norm;
    float eps, attention_scale, softcap, embedding_scale, residual_scale, spare;
    const PlanLayer* layers;
    const Linear *embedding, *head;
    const float* norm;
};

// Mirrored by library.Angles: (positions, half) each.
struct Angles {
    const float *cos, *sin;
    int64_t half;
};

// Mirrored by library.Step.
struct Step {
    const int32_t *tokens, *parents, *positions;  // rows
    const KvView* kv;                             // layers
    const Angles* angles;
    const uint8_t* skip;                          // layers: bit 0 without attention, bit 1 without MLP
    float *logits, *hidden;                       // (rows, …), or one row
    int64_t* drawn;                               // rows: the likeliest token; null: nobody asks
    int64_t vocab;                                // logits behind it are padding
    int32_t rows, start, last_only, spare;
};

constexpr int64_t ALONE_ROWS = 4;  // up to here every thread prepares all rows for itself: cheaper than a barrier

// Buffers of one step, cut from the context's memory.
struct StepBuffers {
    float *x, *q, *k, *v, *mixed, *mlp, *normed, *partials;
    uint8_t* quantised;
    int32_t* path;
};

struct ThreadBuffers {
    float *normed, *attention;
    uint8_t* quantised;
};

class StepRun {
  public:
    StepRun(Pool& pool, const Plan& plan, const Step& step, Scratch& shared, Scratch& threads)
        : pool_(pool), p_(plan), s_(step), rows_(step.rows) {
        widest_ = std::max({int64_t{p_.hidden}, int64_t{p_.intermediate}, int64_t{p_.heads} * p_.dim});
        chain_ = is_chain(step.parents, step.rows);
        cut_shared(shared);
        cut_threads(threads);
        if (!chain_) fill_path(s_.parents, s_.positions, s_.rows, s_.start, b_.path);
        if (s_.drawn != nullptr) tops_.resize(static_cast<size_t>(rows_ * pool_.size));
    }

    void run() {
        pool_.run([this](int thread) { work(thread); });
    }

  private:
    Attention attention_of(int layer) const {
        return {b_.q,         b_.mixed, s_.kv[layer],       p_.heads,  s_.rows,
                s_.start,     s_.positions, chain_ ? nullptr : b_.path, p_.attention_scale, p_.softcap,
                p_.layers[layer].window};
    }

    void cut_shared(Scratch& memory) {
        const int64_t q = int64_t{p_.heads} * p_.dim, kv = int64_t{p_.kv_heads} * p_.dim;
        const int64_t sizes[] = {rows_ * p_.hidden, rows_ * q, rows_ * kv, rows_ * kv, rows_ * q,
                                 rows_ * p_.intermediate, rows_ * widest_, shared_floats(attention_of(0)),
                                 Quantised::bytes(rows_, widest_) / 4 + 1, chain_ ? 0 : rows_ * rows_};
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float* at = memory.need<float>(total);
        float** parts[] = {&b_.x, &b_.q, &b_.k, &b_.v, &b_.mixed, &b_.mlp, &b_.normed, &b_.partials};
        for (int i = 0; i < 8; i++) *parts[i] = at, at += round_up(sizes[i], 16);
        b_.quantised = reinterpret_cast<uint8_t*>(at);
        b_.path = reinterpret_cast<int32_t*>(at + round_up(sizes[8], 16));
    }

    void cut_threads(Scratch& memory) {
        const int64_t own = std::min(rows_, ALONE_ROWS);
        const int64_t normed = round_up(own * widest_, 16);
        const int64_t quantised = round_up(Quantised::bytes(own, widest_) / 4 + 1, 16);
        normed_floats_ = normed;
        quantised_floats_ = quantised;
        thread_size_ = normed + quantised + thread_floats(attention_of(0)) + 16;
        thread_memory_ = memory.need<float>(thread_size_ * pool_.size);
    }

    ThreadBuffers own(int thread) const {
        float* at = thread_memory_ + thread * thread_size_;
        return {at, at + normed_floats_ + quantised_floats_, reinterpret_cast<uint8_t*>(at + normed_floats_)};
    }

    // Rows x (rows, k), normalised where there is a norm, ready for linears; for integer weights quantised.
    Rows prepare(int thread, const float* x, int64_t rows, int64_t k, const float* norm, bool integer, bool floats) {
        const bool alone = rows <= ALONE_ROWS;
        float* normed = alone ? own(thread).normed : b_.normed;
        Quantised to(alone ? own(thread).quantised : b_.quantised, rows, k);
        Share share(rows, alone ? 0 : thread, alone ? 1 : pool_.size);
        for (int64_t r = share.begin; r < share.end; r++) {
            const float* row = x + r * k;
            if (norm != nullptr) {
                rms_norm_row(row, norm, p_.eps, k, normed + r * k);
                row = normed + r * k;
            }
            if (integer) quantise_row(row, k, to, r);
        }
        if (!alone) pool_.barrier();
        Rows result = to.rows();
        if (floats) result.x = norm == nullptr ? x : normed, result.stride = k;
        return result;
    }

    template <class... W>
    Rows prepare_for(int thread, const float* x, int64_t rows, int64_t k, const float* norm, const W*... w) {
        return prepare(thread, x, rows, k, norm, (is_integer(*w) || ...), (!is_integer(*w) || ...));
    }

    struct Job {
        const Linear* weight;
        Output to;
    };

    // Several linears of the same rows as one list of units.
    template <int N>
    void linears(int thread, const Rows& x, int64_t rows, const Job (&jobs)[N]) {
        int64_t total = 0, before = 0;
        for (const Job& job : jobs) total += units_of(*job.weight);
        Share share(total, thread, pool_.size);
        for (const Job& job : jobs) {
            const int64_t count = units_of(*job.weight);
            linear_units(*job.weight, std::max<int64_t>(share.begin - before, 0), std::min(share.end - before, count), x,
                         rows, job.to);
            before += count;
        }
        pool_.barrier();
    }

    void embed(int thread) {
        Share share(rows_, thread, pool_.size);
        for (int64_t r = share.begin; r < share.end; r++) {
            float* row = b_.x + r * p_.hidden;
            weight_row(*p_.embedding, s_.tokens[r], row);
            for (int i = 0; i < p_.hidden; i++) row[i] *= p_.embedding_scale;
        }
        pool_.barrier();
    }

    void norm_projections(int thread, const PlanLayer& layer) {
        const int64_t q = int64_t{p_.heads} * p_.dim, kv = int64_t{p_.kv_heads} * p_.dim;
        Share share(rows_, thread, pool_.size);
        for (int64_t r = share.begin; r < share.end; r++) {
            if (layer.q_norm) rms_norm_row(b_.q + r * q, layer.q_norm, p_.eps, q, b_.q + r * q);
            if (layer.k_norm) rms_norm_row(b_.k + r * kv, layer.k_norm, p_.eps, kv, b_.k + r * kv);
        }
        pool_.barrier();
    }

    // Per head: norm, rotation, and for keys and values the way into the cache.
    void rotate_and_write(int thread, const PlanLayer& layer, const KvView& kv) {
        const int all = p_.heads + 2 * p_.kv_heads;
        Share share(rows_ * all, thread, pool_.size);
        for (int64_t i = share.begin; i < share.end; i++) {
            const int64_t r = i / all, n = i % all;
            const bool query = n < p_.heads, key = !query && n < p_.heads + p_.kv_heads;
            const int64_t head = query ? n : (n - p_.heads) % p_.kv_heads;
            float* at = (query ? b_.q + (r * p_.heads + head) * p_.dim
                               : (key ? b_.k : b_.v) + (r * p_.kv_heads + head) * p_.dim);
            const float* norm = query ? layer.q_norm : key ? layer.k_norm : nullptr;
            if (p_.qk_norm == PER_HEAD && norm != nullptr) rms_norm_row(at, norm, p_.eps, p_.dim, at);
            if ((query || key) && layer.rope >= 0) {
                const Angles& angles = s_.angles[layer.rope];
                const int64_t place = s_.positions[r] * angles.half;
                rotate(at, angles.cos + place, angles.sin + place, angles.half);
            }
            if (!query) write_slot(kv, key, head, s_.start + r, at);
        }
        pool_.barrier();
    }

    // x += what a linear makes of `input`; through a norm of its own where the family has one.
    void add(int thread, const Linear& w, const float* input, int64_t k, const float* norm) {
        const Rows rows = prepare_for(thread, input, rows_, k, nullptr, &w);
        if (norm == nullptr) return linears<1>(thread, rows, rows_, {{&w, {b_.x, p_.hidden, b_.x, p_.residual_scale}}});
        linears<1>(thread, rows, rows_, {{&w, {b_.normed, p_.hidden, nullptr, 1.0f}}});
        Share share(rows_, thread, pool_.size);
        for (int64_t r = share.begin; r < share.end; r++) {
            float *y = b_.normed + r * p_.hidden, *x = b_.x + r * p_.hidden;
            rms_norm_row(y, norm, p_.eps, p_.hidden, y);
            for (int i = 0; i < p_.hidden; i++) x[i] += p_.residual_scale == 1.0f ? y[i] : y[i] * p_.residual_scale;
        }
        pool_.barrier();
    }

    void attention_layer(int thread, int index) {
        const PlanLayer& l = p_.layers[index];
        const int64_t q = int64_t{p_.heads} * p_.dim, kv = int64_t{p_.kv_heads} * p_.dim;
        const Rows rows = prepare_for(thread, b_.x, rows_, p_.hidden, l.before_attention, l.q, l.k, l.v);
        linears<3>(thread, rows, rows_, {{l.q, {b_.q, q, nullptr, 1.0f}},
                                         {l.k, {b_.k, kv, nullptr, 1.0f}},
                                         {l.v, {b_.v, kv, nullptr, 1.0f}}});
        if (p_.qk_norm == PER_PROJECTION) norm_projections(thread, l);
        rotate_and_write(thread, l, s_.kv[index]);
        attention(pool_, thread, attention_of(index), b_.partials, own(thread).attention);
        pool_.barrier();
        add(thread, *l.o, b_.mixed, q, l.after_attention);
    }

    void gate_and_up(int thread, const PlanLayer& l, const Rows& x) {
        const Chunks chunks(rows_);
        Share share(units_of(*l.gate), thread, pool_.size);
        const int64_t size = p_.intermediate;
        VF g[ROWS_MAX], u[ROWS_MAX];
        for (int64_t unit = share.begin; unit < share.end; unit++)
            for (int64_t row = 0; row < rows_; row += chunks.size) {
                const TileKernel gate(*l.gate, chunks.count_at(row)), up(*l.up, chunks.count_at(row));
                const Rows chunk = x.from(row);
                const int64_t last = std::min((unit + 1) * TILES, tiles_of(*l.gate));
                for (int64_t tile = unit * TILES; tile < last; tile++) {
                    gate(*l.gate, tile, chunk, g);
                    up(*l.up, tile, chunk, u);
                    for (int r = 0; r < gate.rows; r++)
                        store_part(b_.mlp + (row + r) * size + tile * L, activate(g[r], p_.activation) * u[r],
                                   static_cast<int>(size - tile * L));
                }
            }
        pool_.barrier();
    }

    void mlp_layer(int thread, int index) {
        const PlanLayer& l = p_.layers[index];
        gate_and_up(thread, l, prepare_for(thread, b_.x, rows_, p_.hidden, l.before_mlp, l.gate, l.up));
        add(thread, *l.down, b_.mlp, p_.intermediate, l.after_mlp);
    }

    // The logits, and what is largest in each row: every thread looks through the columns that it has just written.
    void head(int thread, const Rows& x, int64_t rows) {
        const Linear& w = *p_.head;
        if (s_.drawn == nullptr) return linears<1>(thread, x, rows, {{&w, {s_.logits, w.n, nullptr, 1.0f}}});
        Share share(units_of(w), thread, pool_.size);
        linear_units(w, share.begin, share.end, x, rows, {s_.logits, w.n, nullptr, 1.0f});
        const int64_t begin = std::min(share.begin * UNIT, s_.vocab), end = std::min(share.end * UNIT, s_.vocab);
        for (int64_t r = 0; r < rows; r++)
            tops_[static_cast<size_t>(r * pool_.size + thread)] = top_of(s_.logits + r * w.n, begin, end);
        pool_.barrier();
        if (thread == 0)
            for (int64_t r = 0; r < rows; r++) {
                const Top* parts = tops_.data() + r * pool_.size;
                Top top = parts[0];
                for (int part = 1; part < pool_.size; part++) top.join(parts[part]);
                s_.drawn[r] = top.token();
            }
    }

    void work(int thread) {
        embed(thread);
        for (int i = 0; i < p_.layer_count; i++) {
            if (!(s_.skip[i] & 1)) attention_layer(thread, i);
            if (!(s_.skip[i] & 2)) mlp_layer(thread, i);
        }
        const int64_t rows = s_.last_only ? 1 : rows_;
        const float* x = b_.x + (rows_ - rows) * p_.hidden;
        if (thread == 0) memcpy(s_.hidden, x, sizeof(float) * static_cast<size_t>(rows * p_.hidden));
        const Rows ready = prepare_for(thread, x, rows, p_.hidden, p_.norm, p_.head);
        head(thread, ready, rows);
    }

    Pool& pool_;
    const Plan& p_;
    const Step& s_;
    const int64_t rows_;
    int64_t widest_ = 0, normed_floats_ = 0, quantised_floats_ = 0, thread_size_ = 0;
    float* thread_memory_ = nullptr;
    StepBuffers b_{};
    std::vector<Top> tops_;  // rows × threads
    bool chain_ = true;
};
