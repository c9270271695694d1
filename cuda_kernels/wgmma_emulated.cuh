// The emulated half of wgmma.cuh: mbarriers, TMA loads, warpgroup products. Needs block_fma.cuh. Nothing for a device.
//
// What is modelled
//   An mbarrier is 64 bits of shared memory: arrivals to come, bytes to come (tx-count), phase. A phase ends when both
//   are 0. A thread that waits lets others run; a wait that nothing can end is reported as a deadlock.
//   A TMA load decodes the 128 bytes that _tensor_map.py wrote and copies at once, the earliest that hardware may;
//   elements outside the tensor are zero, and count as bytes that arrive.
//   A warpgroup product reads both operands through its 64-bit descriptors and runs when it is waited for, the latest
//   that hardware may: accumulators that are read, or a stage that is handed back, before the wait are wrong bits.
//   Swizzling XORs address bits 4 to 6 with bits 7 to 9, in the load and in the product alike (32- and 64-byte modes:
//   fewer bits), so a stage that does not begin at a multiple of 1024 bytes or an advance along K that is not
//   32 bytes is wrong bits too.
// What is not: clusters, multicast, base offsets of a descriptor, tensor maps of other ranks, the order of memory.
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "mbarrier"; CUDA driver API, tensor maps.
#pragma once

#if defined(QSIM_EMULATED)

struct __align__(64) QsimTensorMap {
    unsigned long long word[16];  // as _tensor_map.py writes them: see qsim_tma_load
};

namespace qsim_hopper {

using qsim_emulation::block;
using qsim_emulation::fail;

constexpr unsigned WINDOW = 0x410;  // shared address of the first dynamic byte: 16-byte aligned, and no more
constexpr unsigned GROUP = 128;     // threads of a warpgroup
constexpr unsigned long long TENSOR_MAP = 0x50414D4D49535121ull;

template <typename... A>
[[noreturn]] void refuse(const char* what, A... values)
{
    std::fprintf(stderr, "qsim emulation: thread %u: ", block->current);
    std::fprintf(stderr, what, values...);
    std::fputc('\n', stderr);
    fail();
}

inline unsigned char* shared(unsigned address, unsigned bytes)
{
    const unsigned long long size = block->dynamic.size() - 16;  // launch() adds 16
    if (address < WINDOW || address + 1ull * bytes > WINDOW + size)
        refuse("shared address %#x (%u bytes) is outside the dynamic shared memory", address, bytes);
    return block->dynamic.data() + (address - WINDOW);
}

// ---- mbarriers ---------------------------------------------------------------------------------------------------

struct Barrier {
    unsigned long long pending : 20, count : 20, phase : 1;
    long long bytes : 21;
    unsigned long long mark : 2;  // 1: initialised; shared memory that was never written reads 2
};
static_assert(sizeof(Barrier) == 8, "an mbarrier is 64 bits");

inline Barrier& barrier(unsigned address)
{
    if (address % 8 != 0) refuse("mbarrier at %#x is not 8-byte aligned", address);
    auto* own = reinterpret_cast<Barrier*>(shared(address, 8));
    if (own->mark != 1) refuse("mbarrier at %#x was never initialised", address);
    return *own;
}

inline void settle(Barrier& own)
{
    if (own.pending != 0 || own.bytes != 0) return;
    own.phase ^= 1;
    own.pending = own.count;
}

inline void arrive(Barrier& own, unsigned address)
{
    if (own.pending == 0) refuse("mbarrier at %#x: more arrivals than its phase expects", address);
    own.pending -= 1;
    settle(own);
}

// ---- warpgroup products --------------------------------------------------------------------------------------------

struct Product;
using Multiply = void (*)(const Product* const* threads);

struct Product {
    float* sums;  // the 64 accumulators of this thread
    unsigned long long a, b;
    bool keep;
    Multiply multiply;

    bool same(const Product& other) const
    {
        return a == other.a && b == other.b && keep == other.keep && multiply == other.multiply;
    }
};

using Products = std::vector<Product>;

struct Thread {
    bool fenced = false;
    Products open;
    std::vector<Products> committed;  // the oldest first
};

struct Warpgroup {
    unsigned arrived = 0, left = 0;
    unsigned long generation = 0;
};

struct Room {
    std::vector<Thread> threads;
    std::vector<Warpgroup> groups;
};

inline Room& room()
{
    if (!block->extra) {
        auto own = std::make_shared<Room>();
        own->threads.resize(block->fibres.size());
        own->groups.resize(block->fibres.size() / GROUP + 1);
        block->extra = own;
    }
    return *static_cast<Room*>(block->extra.get());
}

// Address of byte k of a row of an operand, K-major: 8 rows of ``width`` bytes lie together, the next 8 a stride on.
inline unsigned address_of(unsigned long long descriptor, int row, int k)
{
    if (descriptor & 0x3FFFC000C000C000ull) refuse("matrix descriptor %#llx: bits that are not modelled", descriptor);
    const auto field = [&](int at) { return static_cast<unsigned>(descriptor >> at & 0x3FFFu) << 4; };
    const unsigned start = field(0), leading = field(16), stride = field(32);
    const unsigned mode = static_cast<unsigned>(descriptor >> 62);
    const unsigned eight = start + row / 8 * stride, r = row % 8;
    if (mode == 0) return eight + r * 16 + k / 16 * leading + k % 16;
    const unsigned width = 128u >> (mode - 1), linear = eight + r * width + k;
    if (start >> 7 & (width / 16 - 1)) refuse("an operand at %#x: its swizzle pattern begins elsewhere", start);
    return linear ^ (linear >> 7 & (width / 16 - 1)) << 4;
}

// The codes of ROWS rows; ``zero`` and ``finite`` say it of a whole row.
template <int ROWS>
struct Operand {
    qsim_fp8::Code codes[ROWS][32];
    bool zero[ROWS], finite[ROWS];

    void read(unsigned long long descriptor, int format)
    {
        for (int row = 0; row < ROWS; ++row) {
            zero[row] = finite[row] = true;
            for (int k = 0; k < 32; ++k) {
                codes[row][k] = qsim_fp8::decoded(*shared(address_of(descriptor, row, k), 1), format, false);
                zero[row] = zero[row] && codes[row][k].exponent == qsim_fp8::NOTHING;
                finite[row] = finite[row] && codes[row][k].exponent != qsim_fp8::SPECIAL;
            }
        }
    }
};

// m64n128k32: thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 and that + 8, and of every 8 columns two.
template <int A, int B>
void multiply(const Product* const* threads)
{
    static Operand<64> left;
    static Operand<128> right;
    left.read(threads[0]->a, A);
    right.read(threads[0]->b, B);
    for (unsigned t = 0; t < GROUP; ++t)
        for (int i = 0; i < 64; ++i) {
            const unsigned row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + t % 4 * 2 + i % 2;
            float& sum = threads[t]->sums[i];
            const float c = threads[t]->keep ? sum : 0.0f;
            constexpr int MANTISSA = qsim_fp8::mantissa_of(A) + qsim_fp8::mantissa_of(B);
            const bool nothing = (left.zero[row] && right.finite[column]) || (right.zero[column] && left.finite[row]);
            sum = qsim_fp8::canonical(qsim_fp8::step<13, 13>(
                left.codes[row], right.codes[column], nothing ? 0 : 32, MANTISSA, c));
        }
}

// Runs the committed groups of a warpgroup but the last ``left``.
inline void run(Thread* threads, unsigned left)
{
    while (threads[0].committed.size() > left) {
        const Products mine = threads[0].committed[0];
        std::vector<const Product*> each(GROUP);
        for (std::size_t p = 0; p < mine.size(); ++p) {
            for (unsigned t = 0; t < GROUP; ++t) {
                if (threads[t].committed.empty() || threads[t].committed[0].size() != mine.size() ||
                    !mine[p].same(threads[t].committed[0][p]))
                    refuse("threads 0 and %u of a warpgroup issued different wgmma", t);
                each[t] = &threads[t].committed[0][p];
            }
            mine[p].multiply(each.data());
        }
        for (unsigned t = 0; t < GROUP; ++t) threads[t].committed.erase(threads[t].committed.begin());
    }
}

inline void wait_groups(int line, unsigned left)
{
    const unsigned first = block->current / GROUP * GROUP;
    Warpgroup& own = room().groups[block->current / GROUP];
    if (own.arrived != 0 && own.left != left) refuse("threads of a warpgroup wait for different wgmma groups");
    own.left = left;
    room().threads[block->current].fenced = false;
    const unsigned long before = own.generation;
    if (++own.arrived == GROUP) {
        run(&room().threads[first], left);
        own.arrived = 0;
        ++own.generation;
    }
    qsim_emulation::wait_until(line, [&] { return own.generation != before; });
}

}  // namespace qsim_hopper

// ---- the words of wgmma.cuh ----------------------------------------------------------------------------------------

inline unsigned qsim_shared_address(const unsigned char* at)
{
    return qsim_hopper::WINDOW + static_cast<unsigned>(at - qsim_hopper::block->dynamic.data());
}

inline void qsim_barrier_init(unsigned barrier, unsigned count)
{
    if (barrier % 8 != 0) qsim_hopper::refuse("mbarrier at %#x is not 8-byte aligned", barrier);
    *reinterpret_cast<qsim_hopper::Barrier*>(qsim_hopper::shared(barrier, 8)) = {count, count, 0, 0, 1};
}

inline void qsim_shared_zero(unsigned at) { std::memset(qsim_hopper::shared(at, 4), 0, 4); }

inline void qsim_shared_visible() {}

#define qsim_registers_up(count)
#define qsim_registers_down(count)

inline void qsim_barrier_arrive(unsigned barrier) { qsim_hopper::arrive(qsim_hopper::barrier(barrier), barrier); }

inline void qsim_barrier_expect(unsigned barrier, unsigned bytes)
{
    qsim_hopper::Barrier& own = qsim_hopper::barrier(barrier);
    own.bytes += bytes;
    qsim_hopper::arrive(own, barrier);
}

#define qsim_barrier_wait(barrier, parity) qsim_barrier_wait_at(__LINE__, barrier, parity)
inline void qsim_barrier_wait_at(int line, unsigned barrier, unsigned parity)
{
    const qsim_hopper::Barrier& own = qsim_hopper::barrier(barrier);
    qsim_emulation::wait_until(line, [&] { return own.phase != parity; });
}

// word: 0 address, 1 and 2 extents (inner first), 3 bytes from row to row, 4 box (inner, outer << 32), 5 swizzle as the
// driver counts it, 6 a mark.
inline void qsim_tma_load(const QsimTensorMap& map, int inner, int outer, unsigned to, unsigned barrier)
{
    using namespace qsim_hopper;
    const unsigned long long* word = map.word;
    const auto width = static_cast<unsigned>(word[4]), rows = static_cast<unsigned>(word[4] >> 32);
    if (word[6] != TENSOR_MAP) refuse("no tensor map that the emulation knows");
    if (word[5] != 0 && (word[5] != 3 || width != 128)) refuse("a tensor map of swizzle %llu is not modelled", word[5]);
    if (to % 128 != 0) refuse("a TMA load to shared address %#x, which is not 128-byte aligned", to);
    const auto* codes = reinterpret_cast<const unsigned char*>(word[0]);
    for (unsigned row = 0; row < rows; ++row)
        for (unsigned at = 0; at < width; ++at) {
            const long long k = inner + 1ll * at, r = outer + 1ll * row;
            const bool inside = k >= 0 && r >= 0 && 1ull * k < word[1] && 1ull * r < word[2];
            unsigned address = to + row * width + at;
            if (word[5] == 3) address ^= (address >> 7 & 7) << 4;
            *shared(address, 1) = inside ? codes[1ull * r * word[3] + k] : 0;
        }
    Barrier& own = qsim_hopper::barrier(barrier);
    own.bytes -= width * rows;
    settle(own);
}

inline void qsim_wgmma_fence(float (&)[64]) { qsim_hopper::room().threads[qsim_hopper::block->current].fenced = true; }

inline void qsim_wgmma_commit()
{
    qsim_hopper::Thread& own = qsim_hopper::room().threads[qsim_hopper::block->current];
    own.committed.push_back(std::move(own.open));
    own.open.clear();
}

template <int LEFT>
inline void qsim_wgmma_wait(float (&)[64])
{
    qsim_hopper::wait_groups(__LINE__, LEFT);
}

template <int A, int B>
inline void qsim_wgmma(float (&d)[64], unsigned long long a, unsigned long long b, bool keep)
{
    qsim_hopper::Thread& own = qsim_hopper::room().threads[qsim_hopper::block->current];
    if (!own.fenced) qsim_hopper::refuse("wgmma without wgmma.fence since the accumulators were last touched");
    own.open.push_back({d, a, b, keep, &qsim_hopper::multiply<A, B>});
}
#endif
