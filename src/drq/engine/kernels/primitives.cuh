// The instructions the kernels are built from: everything that is PTX, and nothing else.
// tests/kernel_emulator.h offers the same names on the CPU, so that the kernels are tested without a GPU.

typedef unsigned int u32;
typedef unsigned short u16;  // the bits of a bfloat16
typedef unsigned char u8;

struct alignas(16) Vec4 {
    u32 v[4];
};

// Start of the block's dynamic shared memory. All shared memory is addressed by byte offsets from here.
__device__ __forceinline__ u32 shared_base() {
    extern __shared__ __align__(16) u8 arena[];
    return (u32)__cvta_generic_to_shared(arena);
}

__device__ __forceinline__ Vec4 load_shared(u32 address) {
    Vec4 r;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "r"(address));
    return r;
}

__device__ __forceinline__ void store_shared(u32 address, const Vec4& r) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(r.v[0]), "r"(r.v[1]), "r"(r.v[2]), "r"(r.v[3]) : "memory");
}

__device__ __forceinline__ void store_shared_u16(u32 address, u16 value) {
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ u16 load_shared_u16(u32 address) {
    u16 r;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(address));
    return r;
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

__device__ __forceinline__ void store_shared_word(u32 address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared_u8(u32 address) {
    u32 r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address));
    return r;
}

__device__ __forceinline__ void store_shared_float(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");
}

// 16 bytes of global memory into shared memory without passing through registers; zeros where not `valid`.
__device__ __forceinline__ void copy_async(u32 destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(destination), "l"(source), "r"(valid ? 16 : 0) : "memory");
}

// The same with 4 bytes.
__device__ __forceinline__ void copy_async_word(u32 destination, const void* source, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(destination), "l"(source), "r"(valid ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of the groups committed last are still under way.
template <int pending> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, one row address per lane (lanes 8i..8i+7 give the rows of matrix i).
__device__ __forceinline__ Vec4 load_matrices(u32 address) {
    Vec4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "r"(address) : "memory");
    return r;
}

__device__ __forceinline__ Vec4 load_matrices_transposed(u32 address) {
    Vec4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "r"(address) : "memory");
    return r;
}

// d[16 x 8] += a[16 x 16] b[16 x 8], bfloat16 factors, float32 sums.
__device__ __forceinline__ void multiply_add(float (&d)[4], const Vec4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
}

// The same for the four warps of a group, 16 rows of 64 each, with 64 or 128 columns: d[16 x N] += a[16 x 16] b[16 x N].
// All of them multiply with `factors` in shared memory: at [k / 8][column] 16 bytes, eight neighbouring k. The multiplier, which
// Hopper alone has, reads them itself, while the warps go on: products stand between begin and end, and neither they nor `a`
// may be touched until they have been waited for.
//
// The factors come as blocks of memory. One instruction copies a block, past the threads, and counts at its barrier what has
// landed: what threads copied would have to be passed on to the multiplier, and that waits for all that is still under way.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void prepare_barriers(u32 barriers, int count) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + i * 8) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
}

__device__ __forceinline__ void fetch_block(u32 to, const void* from, int bytes, u32 barrier) {
    if (threadIdx.x != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// `round`: how often something was fetched to this barrier before.
__device__ __forceinline__ void wait_for_block(u32 barrier, int round) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(barrier), "r"(round & 1) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define SUMS_OF(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

__device__ __forceinline__ void multiply_described(float (&d)[8][4], const Vec4& a, unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b));
}

__device__ __forceinline__ void multiply_described(float (&d)[16][4], const Vec4& a, unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7),
          SUMS_OF(8), SUMS_OF(9), SUMS_OF(10), SUMS_OF(11), SUMS_OF(12), SUMS_OF(13), SUMS_OF(14), SUMS_OF(15)
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b));
}

template <int BLOCKS_OF_8>
__device__ __forceinline__ void multiply_wide(float (&d)[BLOCKS_OF_8][4], const Vec4& a, u32 factors) {
    // All in units of 16 bytes: where they begin, from one k / 8 to the next, from eight columns to the next eight.
    multiply_described(d, a, (unsigned long long)8 << 32 | BLOCKS_OF_8 * 8 << 16 | factors >> 4);
}
#endif

// Two floats rounded to bfloat16, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Two bfloat16, each zero where it is below; a NaN stays one.
__device__ __forceinline__ u32 relu_bf16(u32 pair) {
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(0));
    return r;
}

// All bits of each half in which two words are the same, for halves that are whole numbers below 1,024.
__device__ __forceinline__ u32 same_halves(u32 a, u32 b) {
    u32 r;
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Two bytes as bfloat16 (exact), the first in the low half. 2^23 + byte is the float with bits 0x4B0000xx.
__device__ __forceinline__ u32 pack_bytes(u32 low, u32 high) {
    float a = __uint_as_float(0x4B000000u | low) - 8388608.0f;
    float b = __uint_as_float(0x4B000000u | high) - 8388608.0f;
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
}

__device__ __forceinline__ int bits_of(float x) { return __float_as_int(x); }
__device__ __forceinline__ float float_of(int bits) { return __int_as_float(bits); }

// Which lanes of the warp say yes, the first in the lowest bit.
__device__ __forceinline__ u32 votes(bool yes) { return __ballot_sync(0xFFFFFFFFu, yes); }
__device__ __forceinline__ int count_bits(u32 word) { return __popc(word); }

// Counts blocks that have written their part: true in every thread of the last one, which then sees what all have
// written. Called by all threads of all blocks of the launch; the counter starts at zero and is left there.
__device__ __forceinline__ bool is_last_block(u32* counter) {
    __syncthreads();  // all threads have written before one counts; the fences pass that on to other multiprocessors
    bool last = false;
    if (threadIdx.x == 0) {
        const u32 others = gridDim.x * gridDim.y - 1;
        __threadfence();
        last = atomicInc(counter, others) == others;
        __threadfence();
    }
    return __syncthreads_or(last);
}
