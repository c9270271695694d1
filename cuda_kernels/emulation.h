// CUDA on a CPU, for g++ to compile a kernel's own text and run it: blocks, shared memory, barriers, warp operations,
// atomics. Threads of a block are fibres on one host thread, blocks run one after another, in ascending order.
//
// What it finds: a barrier that some threads of a block never reach, or reach at another line, a warp operation that
// some of its lanes never reach, a wait that nothing ends (a message on stderr, and launch returns false); shared
// memory that is read before it is written (it is filled with 0xA5 before every block). What it cannot find: races
// between barriers, as fibres switch only there. Under AddressSanitizer (host.py) an access outside global or dynamic
// shared memory ends the process; outside a __shared__ variable it is not seen. Compile with -std=c++17
// -ffp-contract=off: then + - * / are the _rn operations, subnormals included.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define QSIM_EMULATED 1
#define __global__
#define __grid_constant__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("qsim_shared")))
#define QSIM_DYNAMIC_SHARED(name) unsigned char* const name = ::qsim_emulation::dynamic_shared()

extern "C" {
// The linker's bounds of all __shared__ variables; absent where a text has none.
extern char __start_qsim_shared[] __attribute__((weak));
extern char __stop_qsim_shared[] __attribute__((weak));
}

namespace qsim_emulation {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 1 << 17;  // of a fibre
constexpr std::size_t BLOB = 256;       // of what a lane hands to a warp operation

struct Index {
    unsigned x, y, z;
};

// ---- switching stacks --------------------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void qsim_switch(void** from, void* to);
asm(R"(
    .text
    .weak qsim_switch
    .type qsim_switch, @function
qsim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size qsim_switch, .-qsim_switch
)");

struct Context {
    void* pointer = nullptr;

    void begin(unsigned char* stack, void (*entry)())
    {
        // 16-byte alignment as at the entry of a function: the address of the next return lies at 8 modulo 16.
        auto top = reinterpret_cast<std::uintptr_t>(stack + STACK) & ~std::uintptr_t(15);
        auto** words = reinterpret_cast<void**>(top);
        *--words = nullptr;
        *--words = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--words = nullptr;
        pointer = words;
    }

    static void change(Context& from, Context& to) { qsim_switch(&from.pointer, to.pointer); }
};
#else
}  // namespace qsim_emulation
#include <ucontext.h>
namespace qsim_emulation {
struct Context {
    ucontext_t own;

    void begin(unsigned char* stack, void (*entry)())
    {
        getcontext(&own);
        own.uc_stack.ss_sp = stack;
        own.uc_stack.ss_size = STACK;
        own.uc_link = nullptr;
        makecontext(&own, entry, 0);
    }

    static void change(Context& from, Context& to) { swapcontext(&from.own, &to.own); }
};
#endif

// ---- a block -----------------------------------------------------------------------------------------------------

enum class State { READY, AT_BARRIER, WAITING, DONE };

using Combine = void (*)(unsigned mask, unsigned char (*in)[BLOB], unsigned char (*out)[BLOB]);

struct Warp {
    unsigned arrived = 0, wanted = 0;
    int line = 0;
    unsigned long generation = 0;
    unsigned char in[WARP][BLOB], out[WARP][BLOB];
};

struct Fibre {
    Context context;
    State state = State::READY;
    int line = 0;
    Index index{};
};

struct Block {
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    unsigned char* stacks = nullptr;
    std::vector<unsigned char> dynamic;
    Context scheduler;
    unsigned current = 0;
    bool failed = false;
    unsigned long progress = 0;   // waits that ended
    std::shared_ptr<void> extra;  // what a header keeps beside the threads of one block
    void (*run)(void*) = nullptr;
    void* arguments = nullptr;
    int counted = 0;  // of __syncthreads_or and its like
    int agreed = 0;
};

inline thread_local Block* block = nullptr;
inline thread_local Index grid_size, block_size, block_index;

// Kept from launch to launch: fresh pages would cost more than most kernels. Launches come one at a time (host.py).
inline unsigned char* stack_memory(std::size_t bytes)
{
    static unsigned char* kept = nullptr;
    static std::size_t size = 0;
    if (size < bytes) {
        std::free(kept);
        kept = static_cast<unsigned char*>(std::malloc(bytes));
        size = kept == nullptr ? 0 : bytes;
        if (kept == nullptr) std::abort();
    }
    return kept;
}

inline Fibre& self() { return block->fibres[block->current]; }
inline unsigned char* dynamic_shared() { return block->dynamic.data(); }
inline unsigned lane() { return block->current % WARP; }
inline Warp& warp() { return block->warps[block->current / WARP]; }

inline void pause() { Context::change(self().context, block->scheduler); }

// Ends the block: the launch fails. The reason has been written to stderr.
[[noreturn]] inline void fail()
{
    block->failed = true;
    pause();
    std::abort();  // nobody resumes what failed
}

// Other fibres run until ready(); a block in which no wait ends any more is a deadlock.
template <typename Ready>
void wait_until(int line, Ready ready)
{
    self().line = line;
    while (!ready()) {
        self().state = State::WAITING;
        pause();
    }
    ++block->progress;
}

inline void enter()
{
    block->run(block->arguments);
    self().state = State::DONE;
    pause();
    std::abort();  // nobody resumes what is done
}

inline void wait_at_barrier(int line)
{
    self().state = State::AT_BARRIER;
    self().line = line;
    pause();
}

// All lanes of ``mask`` meet at one line; the last one combines what they brought.
template <typename In, typename Out>
Out meet(unsigned mask, int line, const In& mine, Combine combine)
{
    static_assert(sizeof(In) <= BLOB && sizeof(Out) <= BLOB, "a lane brings at most BLOB bytes");
    Warp& own = warp();
    const unsigned me = lane();
    if (!(mask >> me & 1u)) {
        std::fprintf(stderr, "qsim emulation: line %d: lane %u is not in the mask %08x it uses\n", line, me, mask);
        fail();
    }
    if (own.arrived == 0) {
        own.line = line;
        own.wanted = mask;
    } else if (own.line != line || own.wanted != mask) {
        std::fprintf(stderr, "qsim emulation: lanes of a warp meet at lines %d (mask %08x) and %d (mask %08x)\n",
                     own.line, own.wanted, line, mask);
        fail();
    }
    std::memcpy(own.in[me], &mine, sizeof mine);
    own.arrived |= 1u << me;
    const unsigned long before = own.generation;
    if ((own.arrived & own.wanted) == own.wanted) {
        combine(own.wanted, own.in, own.out);
        own.arrived = 0;
        ++own.generation;
    }
    wait_until(line, [&] { return own.generation != before; });
    Out result{};
    std::memcpy(&result, own.out[me], sizeof result);
    return result;
}

// Runs every fibre as far as it goes, again and again; false where none can go on.
inline bool run_block()
{
    for (;;) {
        bool moved = false, live = false, all_at_barrier = true;
        int line = 0;
        for (unsigned i = 0; i < block->fibres.size(); ++i) {
            Fibre& fibre = block->fibres[i];
            if (fibre.state == State::READY || fibre.state == State::WAITING) {
                const bool waiting = fibre.state == State::WAITING;
                const unsigned long before = block->progress;
                block->current = i;
                fibre.state = State::READY;
                Context::change(block->scheduler, fibre.context);
                moved = moved || !waiting || fibre.state != State::WAITING || block->progress != before;
            }
            if (block->failed) return false;
            if (fibre.state == State::DONE) continue;
            live = true;
            if (fibre.state != State::AT_BARRIER) {
                all_at_barrier = false;
            } else if (line != 0 && fibre.line != line) {
                std::fprintf(stderr, "qsim emulation: threads of a block wait at barriers of lines %d and %d\n", line,
                             fibre.line);
                return false;
            } else {
                line = fibre.line;
            }
        }
        if (!live) return true;
        if (all_at_barrier) {
            block->agreed = block->counted;
            block->counted = 0;
            for (Fibre& fibre : block->fibres)
                if (fibre.state == State::AT_BARRIER) fibre.state = State::READY;
        } else if (!moved) {
            for (unsigned i = 0; i < block->fibres.size(); ++i)
                if (block->fibres[i].state == State::WAITING || block->fibres[i].state == State::AT_BARRIER)
                    std::fprintf(stderr, "qsim emulation: deadlock: thread %u of block (%u, %u, %u) waits at line %d\n",
                                 i, block_index.x, block_index.y, block_index.z, block->fibres[i].line);
            return false;
        }
    }
}

template <typename... A, std::size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>)
{
    kernel(*static_cast<A*>(args[I])...);
}

template <typename... A>
struct Launch {
    void (*kernel)(A...);
    void** args;

    static void run(void* self)
    {
        auto* own = static_cast<Launch*>(self);
        call(own->kernel, own->args, std::index_sequence_for<A...>{});
    }
};

// As cudaLaunchKernel: args[i] points to the i-th argument, dynamic is the size of the dynamic shared memory. False
// where a block cannot finish.
template <typename... A>
bool launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, unsigned dynamic, void** args)
{
    Launch<A...> own{kernel, args};
    Block mine;
    const unsigned count = threads[0] * threads[1] * threads[2];
    mine.fibres.resize(count);
    mine.warps.resize((count + WARP - 1) / WARP);
    mine.stacks = stack_memory(STACK * count);
    mine.dynamic.resize(dynamic + 16);
    mine.run = &Launch<A...>::run;
    mine.arguments = &own;
    block = &mine;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {threads[0], threads[1], threads[2]};
    bool fine = true;
    for (unsigned b = 0; fine && b < grid[0] * grid[1] * grid[2]; ++b) {
        block_index = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        if (__start_qsim_shared != nullptr)
            std::memset(__start_qsim_shared, 0xA5, static_cast<std::size_t>(__stop_qsim_shared - __start_qsim_shared));
        std::memset(mine.dynamic.data(), 0xA5, mine.dynamic.size());
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(mine.stacks, STACK * count);  // frames that a fibre never left
#endif
        for (unsigned i = 0; i < count; ++i) {
            Fibre& fibre = mine.fibres[i];
            fibre.state = State::READY;
            fibre.index = {i % threads[0], i / threads[0] % threads[1], i / threads[0] / threads[1]};
            fibre.context.begin(mine.stacks + STACK * i, &enter);
        }
        for (Warp& w : mine.warps) w.arrived = 0;
        mine.extra.reset();
        fine = run_block();
    }
    block = nullptr;
    return fine;
}

}  // namespace qsim_emulation

#define threadIdx (::qsim_emulation::self().index)
#define blockIdx (::qsim_emulation::block_index)
#define blockDim (::qsim_emulation::block_size)
#define gridDim (::qsim_emulation::grid_size)
#define warpSize 32

#include "emulation_words.h"
