// What the kernels share: how pixels and weights lie in shared memory, and how they get there.
//
// A pixel of a 32-channel activation is 64 bytes. In shared memory it takes 80: ldmatrix then reads any 8
// consecutive pixels without bank conflicts, and the nine taps of a 3 x 3 window are constant byte offsets.

constexpr int CHANNELS = 32;
constexpr int PIXEL = 80;
constexpr int THREADS = WARPS * 32;
constexpr int TAPS = 9;

// Where a weight lies in the fragments that `multiply_add` takes as its second factor: the byte offsets of its output
// channel, of its input channel and of its tap, added up. 16 input and 32 output channels of a tap make a fragment
// group: 1,024 bytes, two 16-byte loads per lane. Output channels are dealt so that a lane ends up with eight
// neighbouring ones: 16 bytes to store.
__device__ __forceinline__ int output_offset(int channel) {
    int block = (channel >> 1) & 3, column = (channel >> 3) * 2 + (channel & 1);
    return (block >> 1) * 512 + (block & 1) * 8 + column * 64;
}

__device__ __forceinline__ int input_offset(int channel) {
    return (channel >> 4) * 1024 + ((channel >> 3) & 1) * 4 + ((channel & 7) >> 1) * 16 + (channel & 1) * 2;
}

// Weights [32][REAL][9] as fragments of PADDED input channels. TURNED: of the transposed window, channels swapped and
// taps turned round. A lane has the same places in the rows of all output channels, so it works their offsets out once;
// it reads four rows before it writes one, because every block waits for this before its first product.
template <int REAL, int PADDED, int TAP_BYTES, bool TURNED>
__device__ __forceinline__ void stage_weights(u32 base, const float* weight) {
    constexpr int READS = (PADDED * TAPS + 31) / 32, AT_ONCE = 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 to[READS];
#pragma unroll
    for (int k = 0; k < READS; ++k) {
        int input = (k * 32 + lane) / TAPS, tap = k * 32 + lane - input * TAPS;
        to[k] = base + (TURNED ? output_offset(input) : input_offset(input));
        to[k] += (TURNED ? TAPS - 1 - tap : tap) * TAP_BYTES;
    }
#pragma unroll 1
    for (int first = warp; first < CHANNELS; first += WARPS * AT_ONCE) {
        float values[AT_ONCE][READS];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
            for (int k = 0; k < READS; ++k) {
                int output = first + n * WARPS, place = k * 32 + lane;
                bool real = output < CHANNELS && place < REAL * TAPS;
                values[n][k] = real ? weight[output * (REAL * TAPS) + place] : 0.0f;
            }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
            for (int k = 0; k < READS; ++k) {
                int output = first + n * WARPS;
                if (output >= CHANNELS || k * 32 + lane >= PADDED * TAPS) continue;
                u32 row = TURNED ? input_offset(output) : output_offset(output);
                store_shared_u16(to[k] + row, (u16)pack_bf16(values[n][k], 0.0f));
            }
    }
}

// Keeps the halves of `value` whose partner in `gate` is above zero.
__device__ __forceinline__ u32 gated(u32 value, u32 gate) {
    u32 open = ((gate & 0x7FFF7FFFu) + 0x7FFF7FFFu) & ~gate & 0x80008000u;  // the top bit of each such half
    return value & ((open << 1) - (open >> 15));
}

// `count` consecutive pixels from `first`, zeros from pixel `limit` on.
__device__ __forceinline__ void copy_pixels(u32 destination, const u16* source, int first, int count, int limit) {
    for (int i = threadIdx.x; i < count * 4; i += THREADS) {
        int pixel = i >> 2, chunk = i & 3;
        bool valid = first + pixel < limit;
        size_t from = valid ? (size_t)(first + pixel) * CHANNELS + chunk * 8 : 0;
        copy_async(destination + pixel * PIXEL + chunk * 16, source + from, valid);
    }
}

// One product of 16 pixels and a fragment group: 32 output channels.
__device__ __forceinline__ void multiply_group(float (&sums)[4][4], const Vec4& pixels, const Vec4& w0,
                                               const Vec4& w1) {
    multiply_add(sums[0], pixels, w0.v[0], w0.v[1]);
    multiply_add(sums[1], pixels, w0.v[2], w0.v[3]);
    multiply_add(sums[2], pixels, w1.v[0], w1.v[1]);
    multiply_add(sums[3], pixels, w1.v[2], w1.v[3]);
}

// Eight neighbouring channels of one pixel: relu(scale * sums + bias) as bfloat16. `half`: rows 0-7 or 8-15.
__device__ __forceinline__ Vec4 activated(const float (&sums)[4][4], int half, float scale, const float (&bias)[8]) {
    Vec4 r;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float low = sums[j][half * 2] * scale + bias[j * 2];
        float high = sums[j][half * 2 + 1] * scale + bias[j * 2 + 1];
        r.v[j] = pack_bf16(low > 0.0f ? low : 0.0f, high > 0.0f ? high : 0.0f);
    }
    return r;
}
