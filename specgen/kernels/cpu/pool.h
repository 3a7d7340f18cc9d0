// A persistent pool of threads: run one function on all of them, with barriers inside.
//
// Knows: threads wait by a short spin and then sleep, so that an idle pool costs nothing and a busy one no system
// calls. Does not know: what runs. The caller is thread 0. After a fork the child starts threads of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#define SG_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define SG_PAUSE() asm volatile("yield")
#else
#define SG_PAUSE() ((void)0)
#endif

// A wait inside a step takes a microsecond when nobody else wants the cores. One that takes longer has a reason, often
// that two of our threads share a core: then giving it away is what ends the wait. After that, sleep.
constexpr int BUSY_SPINS = 200, SPINS = 400;

struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void wait_while(uint32_t seen) {
        for (int i = 0; i < SPINS; i++) {
            if (value.load(std::memory_order_acquire) != seen) return;
            if (i < BUSY_SPINS) SG_PAUSE();
            else sched_yield();
        }
        sleepers.fetch_add(1);
        while (value.load() == seen) value.wait(seen);
        sleepers.fetch_sub(1);
    }

    void set(uint32_t next) {
        value.store(next);
        if (sleepers.load() != 0) value.notify_all();
    }
};

class Pool {
  public:
    explicit Pool(int threads) : size(threads < 1 ? 1 : threads) { start(); }

    ~Pool() {
        if (getpid() != owner_) return;  // the threads live in the parent: their handles are of no use here
        task_ = nullptr;
        epoch_.set(epoch_.value.load() + 1);
        for (auto& thread : *threads_) thread.join();
        delete threads_;
        delete[] cpus_;
    }

    // function(thread number) on every thread; returns when all are done.
    template <class F>
    void run(const F& function) {
        if (getpid() != owner_) restart_after_fork();
        if (size == 1) return function(0);
        claim_cpu(0);
        context_ = &function;
        task_ = [](const void* context, int thread) { (*static_cast<const F*>(context))(thread); };
        epoch_.set(epoch_.value.load() + 1);
        function(0);
        barrier();
    }

    // All threads of a run meet here.
    void barrier() {
        if (size == 1) return;
        uint32_t phase = phase_.value.load(std::memory_order_acquire);
        if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size)) {
            arrived_.value.store(0, std::memory_order_relaxed);
            phase_.set(phase + 1);
        } else {
            phase_.wait_while(phase);
        }
    }

    const int size;

  private:
    void start() {
        owner_ = getpid();
        threads_ = new std::vector<std::thread>;
        cpus_ = new std::atomic<int>[static_cast<size_t>(size)];
        for (int i = 0; i < size; i++) cpus_[i] = -1;
        uint32_t epoch = epoch_.value.load();
        for (int i = 1; i < size; i++) threads_->emplace_back([this, i, epoch] { work(i, epoch); });
    }

    void restart_after_fork() {
        // The child has none of the threads: their handles can be neither joined nor destroyed, so they are dropped.
        arrived_.value = 0;
        for (Word* word : {&epoch_, &phase_}) word->sleepers = 0;
        start();
    }

    // Threads that wait for each other on one core make no progress, and on a busy machine the system leaves them there
    // for long. A thread that finds itself on the core of a lower-numbered one moves to a free one of its own mask.
    void claim_cpu(int thread) {
#if defined(__linux__)
        const int cpu = sched_getcpu();
        cpus_[thread].store(cpu, std::memory_order_relaxed);
        if (!taken_before(thread, cpu)) return;
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        for (int other = 0; other < CPU_SETSIZE; other++) {
            if (!CPU_ISSET(other, &allowed) || taken_before(size, other)) continue;
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(other, &one);
            if (sched_setaffinity(0, sizeof one, &one) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
            cpus_[thread].store(other, std::memory_order_relaxed);
            return;
        }
#else
        (void)thread;
#endif
    }

    bool taken_before(int thread, int cpu) const {
        for (int i = 0; i < thread; i++)
            if (cpus_[i].load(std::memory_order_relaxed) == cpu) return true;
        return false;
    }

    void work(int thread, uint32_t epoch) {
        for (;;) {
            epoch_.wait_while(epoch);
            epoch++;
            if (task_ == nullptr) return;
            claim_cpu(thread);
            task_(context_, thread);
            barrier();
        }
    }

    Word epoch_, phase_, arrived_;
    void (*task_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    std::vector<std::thread>* threads_ = nullptr;
    std::atomic<int>* cpus_ = nullptr;  // where each thread was when the run began
    pid_t owner_ = 0;
};

// [begin, end) of `count` items for one of `threads` threads: contiguous, as even as possible.
struct Share {
    int64_t begin, end;
    Share(int64_t count, int thread, int threads)
        : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

// Scratch that grows and is never given back: no allocation per step once warm.
class Scratch {
  public:
    ~Scratch() { free(data_); }
    template <class T>
    T* need(int64_t count) {
        size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64;
        if (bytes > size_) {
            free(data_);
            data_ = aligned_alloc(64, bytes);
            size_ = data_ == nullptr ? 0 : bytes;
            if (data_ == nullptr) abort();
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};
