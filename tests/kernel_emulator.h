// The instructions of src/drq/engine/kernels/primitives.cuh on the CPU, so that the kernels' own text runs without a
// GPU. A thread is a fiber; barriers and warp-wide instructions switch between fibers, in several orders. Shared memory
// starts as NaNs, asynchronous copies land as late as they may or, in every other block, as early, and every address is
// checked: what a GPU would forgive or get wrong now and then fails here every time.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(16) Vec4 {
    u32 v[4];
};

struct Index {
    unsigned x, y;
};

struct Copy {
    u32 to;
    const void* from;
    int bytes;
    bool valid;
};

struct Fiber {
    ucontext_t context;  // enters the fiber; from then on the cheaper jumps
    jmp_buf resume;
    bool started;
    std::vector<char> stack;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
    long block_barriers, warp_barriers;
    bool waits;  // for the other warps of its block
    bool done;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static jmp_buf back;
static int current;
static std::vector<u8> shared;
static Index threadIdx, blockIdx, gridDim;
static bool odd_block;
static u32 exchange[1024][12];

static void fail(const char* what) {
    fprintf(stderr, "emulated kernel: %s (block %u,%u thread %u)\n", what, blockIdx.x, blockIdx.y, threadIdx.x);
    abort();
}

static void yield() {
    if (!_setjmp(fibers[current].resume)) _longjmp(back, 1);
}

static void warp_barrier() {
    long mine = ++fibers[current].warp_barriers;
    int first = current / 32 * 32;
    for (int i = first; i < first + 32; ++i)
        while (fibers[i].warp_barriers < mine) {
            if (fibers[i].done) fail("a lane left its warp");
            yield();
        }
}

static void __syncthreads() {
    long mine = ++fibers[current].block_barriers;
    for (size_t i = 0; i < fibers.size(); ++i)
        while (fibers[i].block_barriers < mine) {
            if (fibers[i].done) fail("a thread missed a barrier");
            fibers[current].waits = true;
            yield();
        }
    fibers[current].waits = false;
}

static bool is_last_block(u32* counter) {
    static bool last;
    __syncthreads();  // before it nobody reads what the last call found
    if (threadIdx.x == 0) {
        last = *counter + 1 == gridDim.x * gridDim.y;
        *counter = last ? 0 : *counter + 1;
    }
    __syncthreads();
    return last;
}

static u8* at(u32 address, int bytes) {
    if (address % bytes || address + bytes > shared.size()) fail("bad shared address");
    return &shared[address];
}

static u32 shared_base() { return 0; }
static Vec4 load_shared(u32 address) { return *(Vec4*)at(address, 16); }
static void store_shared(u32 address, const Vec4& value) { memcpy(at(address, 16), &value, 16); }
static void store_shared_u16(u32 address, u16 value) { memcpy(at(address, 2), &value, 2); }
static u16 load_shared_u16(u32 address) { return *(u16*)at(address, 2); }
static u32 load_shared_word(u32 address) { return *(u32*)at(address, 4); }
static void store_shared_word(u32 address, u32 value) { memcpy(at(address, 4), &value, 4); }
static u32 load_shared_u8(u32 address) { return *at(address, 1); }
static float load_shared_float(u32 address) { return *(float*)at(address, 4); }
static void store_shared_float(u32 address, float value) { memcpy(at(address, 4), &value, 4); }

static void land(const Copy& copy) {
    u8* to = at(copy.to, copy.bytes);
    if (copy.valid) memcpy(to, copy.from, copy.bytes);
    else memset(to, 0, copy.bytes);
}
static void begin(const Copy& copy) {
    if (odd_block) land(copy);  // at once, or below as late as possible: both may happen
    else fibers[current].open.push_back(copy);
}
static void copy_async(u32 to, const void* from, bool valid) { begin({to, from, 16, valid}); }
static void copy_async_word(u32 to, const void* from, bool valid = true) {
    if ((uintptr_t)from % 4) fail("bad global address");
    begin({to, from, 4, valid});
}
static void copy_commit() {
    fibers[current].groups.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
}
template <int pending> void copy_wait() {
    auto& groups = fibers[current].groups;
    while ((int)groups.size() > pending) {
        for (const Copy& copy : groups.front()) land(copy);
        groups.pop_front();
    }
}

static Vec4 matrices(u32 address, bool transposed) {
    int lane = current % 32, first = current - lane;
    exchange[current][0] = address;
    warp_barrier();
    Vec4 r;
    for (int m = 0; m < 4; ++m) {
        u16 pair[2];
        for (int e = 0; e < 2; ++e) {
            int row = lane / 4, column = lane % 4 * 2 + e;
            if (transposed) std::swap(row, column);
            u32 line = exchange[first + m * 8 + row][0];
            at(line, 16);
            memcpy(&pair[e], at(line + column * 2, 2), 2);
        }
        r.v[m] = pair[0] | (u32)pair[1] << 16;
    }
    warp_barrier();
    return r;
}
static Vec4 load_matrices(u32 address) { return matrices(address, false); }
static Vec4 load_matrices_transposed(u32 address) { return matrices(address, true); }

static float half_of(u32 word, int high) {
    u32 bits = high ? word & 0xFFFF0000u : word << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}

static void multiply_add(float (&d)[4], const Vec4& a, u32 b0, u32 b1) {
    int lane = current % 32, first = current - lane;
    u32* mine = exchange[current];
    memcpy(mine, a.v, 16);
    mine[4] = b0, mine[5] = b1;
    warp_barrier();
    for (int r = 0; r < 4; ++r) {
        int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
        for (int k = 0; k < 16; ++k) {
            u32* left = exchange[first + row % 8 * 4 + k % 8 / 2];
            u32* right = exchange[first + column * 4 + k % 8 / 2];
            d[r] += half_of(left[row / 8 + k / 8 * 2], k % 2) * half_of(right[4 + k / 8], k % 2);
        }
    }
    warp_barrier();
}

// What is fetched to a barrier lands as copies of the first thread do: at once, or when it is waited for.
static std::vector<std::deque<std::vector<Copy>>> fetched;
static void prepare_barriers(u32 barriers, int count) {
    at(barriers + count * 8 - 8, 8);
    if (threadIdx.x == 0) fetched.assign(shared.size() / 8, {});
    __syncthreads();
}
static void fetch_block(u32 to, const void* from, int bytes, u32 barrier) {
    if (to % 128 || (uintptr_t)from % 16 || bytes % 16 || barrier % 8) fail("bad block");
    if (threadIdx.x != 0) return;
    std::vector<Copy> block;
    for (int i = 0; i < bytes; i += 16) block.push_back({to + i, (const u8*)from + i, 16, true});
    if (odd_block)
        for (const Copy& copy : block) land(copy);
    fetched[barrier / 8].push_back(std::move(block));
}
static void wait_for_block(u32 barrier, int round) {
    auto& blocks = fetched[barrier / 8];
    for (; (int)blocks.size() <= round; fibers[current].waits = false) {  // not even asked for yet
        fibers[current].waits = true;
        yield();
    }
    for (const Copy& copy : blocks[round]) land(copy);
    blocks[round].clear();
}
static void begin_products() {}
static void end_products() {}
static void wait_for_products() {}
template <int BLOCKS_OF_8> void multiply_wide(float (&d)[BLOCKS_OF_8][4], const Vec4& a, u32 factors) {
    for (int j = 0; j < BLOCKS_OF_8; ++j) {
        u32 b[2];
        for (int half = 0; half < 2; ++half)
            b[half] = *(u32*)at(factors + ((half * BLOCKS_OF_8 + j) * 8 + current % 32 / 4) * 16 + current % 4 * 4, 4);
        multiply_add(d[j], a, b[0], b[1]);
    }
}

static u16 rounded(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bf16(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
static u32 same_halves(u32 a, u32 b) {
    const u32 other = a ^ b;
    return (other & 0xFFFFu ? 0 : 0xFFFFu) | (other >> 16 ? 0 : 0xFFFF0000u);
}
static float from_bf16(u16 bits) { return half_of(bits, 0); }
static u32 relu_bf16(u32 pair) {
    const float low = half_of(pair, 0), high = half_of(pair, 1);
    return pack_bf16(low <= 0.0f ? 0.0f : low, high <= 0.0f ? 0.0f : high);
}
static u32 pack_bytes(u32 low, u32 high) { return pack_bf16((float)low, (float)high); }

static int bits_of(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float float_of(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static u32 votes(bool yes) {
    int first = current / 32 * 32;
    exchange[current][0] = yes;
    warp_barrier();
    u32 r = 0;
    for (int i = 0; i < 32; ++i) r |= exchange[first + i][0] << i;
    warp_barrier();
    return r;
}
static int count_bits(u32 word) { return __builtin_popcount(word); }

// Rounded by itself: kept in memory, no compiler fuses it with what comes next.
static float __fmul_rn(float a, float b) {
    volatile float r = a * b;
    return r;
}
static float __fadd_rn(float a, float b) {
    volatile float r = a + b;
    return r;
}

template <class... A, size_t... I> static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(A*)arguments[I]...);
}

static void resume(int fiber) {
    current = fiber;
    threadIdx = {(unsigned)fiber, 0};
    if (_setjmp(back)) return;
    if (fibers[fiber].started) _longjmp(fibers[fiber].resume, 1);
    fibers[fiber].started = true;
    setcontext(&fibers[fiber].context);
}

template <class... A> static void emulate(void (*kernel)(A...), void** arguments, int grid_x, int grid_y, int threads,
                                          int shared_bytes) {
    static void (*entry)(A...);
    static void** values;
    entry = kernel, values = arguments;
    void (*body)() = [] {
        call(entry, values, std::index_sequence_for<A...>{});
        fibers[current].done = true;
        yield();
    };
    gridDim = {(unsigned)grid_x, (unsigned)grid_y};
    fibers = std::vector<Fiber>(threads);
    for (unsigned y = 0; y < gridDim.y; ++y)
        for (unsigned x = 0; x < gridDim.x; ++x) {
            blockIdx = {x, y};
            shared.assign(shared_bytes, 0xFF);
            for (Fiber& f : fibers) {
                f.stack.resize(1 << 17);
                f.groups.clear(), f.open.clear();
                f.block_barriers = f.warp_barriers = 0, f.waits = f.done = f.started = false;
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data();
                f.context.uc_stack.ss_size = f.stack.size();
                f.context.uc_link = &scheduler;
                makecontext(&f.context, body, 0);
            }
            odd_block = (x + y) % 2;
            // A warp runs as far as it can before the next one does. They go forwards, then backwards, and the other way
            // round in every other block: what hangs on an order, or on a barrier that is not there, shows.
            bool backwards = odd_block;
            for (int running = 1; running; backwards = !backwards) {
                running = 0;
                for (int turn = 0; turn < threads; turn += 32) {
                    int first = backwards ? (threads - 1) / 32 * 32 - turn : turn;
                    int last = std::min(first + 32, threads) - 1;
                    for (bool going = true; going;) {
                        going = false;
                        for (int i = first; i <= last; ++i) {
                            Fiber& f = fibers[backwards ? first + last - i : i];
                            if (!f.done) resume(&f - fibers.data());
                            going |= !f.done && !f.waits;
                        }
                    }
                    for (int i = first; i <= last; ++i) running += !fibers[i].done;
                }
            }
        }
}
