// Words of Hopper: mbarriers, TMA loads, warpgroup products (wgmma), by their PTX names. For sm_90a alone.
//
// NOT YET RUN ON HARDWARE. The device half compiles for sm_90a, and ptxas does not object; what has run is the emulated
// half (wgmma_emulated.cuh), which holds the index arithmetic of a kernel against the rules of the PTX ISA as they
// were read, and no more. All that is particular to these instructions stands in these two files.
//
// Addresses are those of the shared window (32 bits). A barrier is 8 bytes in shared memory; ``parity`` is that of the
// phase waited for, the first being 0: a wait for parity 1 of a fresh barrier returns at once.
#pragma once

// Shared address of a stage is a multiple of this, so that the swizzle pattern begins at its first byte.
#define QSIM_PATTERN 1024

// Descriptor of a K-major operand at ``address``: rows of 128 bytes under the 128-byte swizzle, 8 rows to the next 8
// 1024 bytes apart. The leading offset counts nothing under a swizzle; 1 is what is written there by custom. 32 bytes
// further along K are 2 more in the first field.
__device__ __forceinline__ unsigned long long qsim_descriptor(unsigned address)
{
    return (unsigned long long)(address >> 4 & 0x3FFFu) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 |
           1ull << 62;
}

#if !defined(QSIM_EMULATED)
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma exists on sm_90a alone"
#endif

#define QSIM_DYNAMIC_SHARED(name) extern __shared__ unsigned char name[]

struct __align__(64) QsimTensorMap {
    unsigned long long word[16];  // of the driver: cuTensorMapEncodeTiled
};

__device__ __forceinline__ unsigned qsim_shared_address(const unsigned char* at)
{
    return (unsigned)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ void qsim_barrier_init(unsigned barrier, unsigned count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void qsim_shared_zero(unsigned at)
{
    asm volatile("st.shared.u32 [%0], 0;" ::"r"(at) : "memory");
}

// After stores and inits, before the __syncthreads that lets others see them: the units behind TMA and wgmma included.
__device__ __forceinline__ void qsim_shared_visible()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void qsim_barrier_arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the phase wait for this many bytes of TMA loads too.
__device__ __forceinline__ void qsim_barrier_expect(unsigned barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void qsim_barrier_wait(unsigned barrier, unsigned parity)
{
    unsigned done;
    do {
        asm volatile("{\n\t"
                     ".reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t"
                     "}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (done == 0);
}

// The box of ``map`` whose first element is (outer, inner), to shared memory; its bytes count at ``barrier``.
__device__ __forceinline__ void qsim_tma_load(
    const QsimTensorMap& map, int inner, int outer, unsigned to, unsigned barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(inner), "r"(outer)
                 : "memory");
}

// Of every thread of the warpgroup: multiples of 8.
#define qsim_registers_up(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))
#define qsim_registers_down(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))

#define QSIM_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                     "+f"(d[i + 6]), "+f"(d[i + 7])
#define QSIM_64(d) QSIM_8(d, 0), QSIM_8(d, 8), QSIM_8(d, 16), QSIM_8(d, 24), QSIM_8(d, 32), QSIM_8(d, 40), \
                   QSIM_8(d, 48), QSIM_8(d, 56)

// The accumulators are operands of fence and wait, so that no compiler moves their reads or writes across either.
__device__ __forceinline__ void qsim_wgmma_fence(float (&d)[64])
{
    asm volatile("wgmma.fence.sync.aligned;" : QSIM_64(d)::"memory");
}

__device__ __forceinline__ void qsim_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most LEFT committed groups are under way.
template <int LEFT>
__device__ __forceinline__ void qsim_wgmma_wait(float (&d)[64])
{
    asm volatile("wgmma.wait_group.sync.aligned %64;" : QSIM_64(d) : "n"(LEFT) : "memory");
}

#define QSIM_WGMMA(left, right)                                                                                   \
    asm volatile("{\n\t"                                                                                          \
                 ".reg .pred p;\n\t"                                                                              \
                 "setp.ne.b32 p, %66, 0;\n\t"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32." left "." right " "                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "     \
                 "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "     \
                 "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n\t"                                \
                 "}"                                                                                              \
                 : QSIM_64(d)                                                                                     \
                 : "l"(a), "l"(b), "r"((int)keep))

// d = A B, or + d where ``keep``; A [64, 32] and B [128, 32] by their descriptors, of formats A and B. Asynchronous.
template <int A, int B>
__device__ __forceinline__ void qsim_wgmma(float (&d)[64], unsigned long long a, unsigned long long b, bool keep)
{
    if constexpr (A == QSIM_E4M3 && B == QSIM_E4M3) QSIM_WGMMA("e4m3", "e4m3");
    if constexpr (A == QSIM_E4M3 && B == QSIM_E5M2) QSIM_WGMMA("e4m3", "e5m2");
    if constexpr (A == QSIM_E5M2 && B == QSIM_E4M3) QSIM_WGMMA("e5m2", "e4m3");
    if constexpr (A == QSIM_E5M2 && B == QSIM_E5M2) QSIM_WGMMA("e5m2", "e5m2");
}
#endif
