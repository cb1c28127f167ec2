// A 3 x 3 convolution of few channels within a margin of zeros, and the greatest of result + bias in windows as in
// pooling.cu. What is convolved, four times what comes out, stays in shared memory.
//
// A block takes ROWS rows of the output at a time, of which the convolution has 2 ROWS + 1 and the input two more.

constexpr int THREADS = WARPS * 32, TAPS = 9;
constexpr int PAD_Y = HEIGHT % 2, PAD_X = WIDTH % 2;
constexpr int OUT_ROWS = (HEIGHT + 1) / 2, OUT_COLUMNS = (WIDTH + 1) / 2, STRIPS = (OUT_ROWS + ROWS - 1) / ROWS;
constexpr int CONVOLVED_ROWS = 2 * ROWS + 1, CONVOLVED_PIXELS = CONVOLVED_ROWS * WIDTH;  // held: a multiple of 16
constexpr int VIEW_COLUMNS = WIDTH + 2, VIEW_WORDS = (CONVOLVED_ROWS + 2) * VIEW_COLUMNS * IN_CHANNELS / 2;
constexpr int FACTORS = TAPS * IN_CHANNELS, STEPS = (FACTORS + 15) / 16, BLOCKS_OF_8 = OUT_CHANNELS / 8;
constexpr int PIXEL = OUT_CHANNELS * 2 + 16;  // 16 bytes more: eight pixels then lie in different banks

struct alignas(8) Places {
    u8 v[8];
};

// Bits of two bfloat16 as whole numbers in the same order, and back: negative ones are turned round.
__device__ __forceinline__ u32 ordered(u32 pair) { return pair ^ (((pair >> 15 & 0x00010001u) * 0x7FFFu) | 0x80008000u); }
__device__ __forceinline__ u32 unordered(u32 pair) {
    return pair ^ (((~pair >> 15 & 0x00010001u) * 0x7FFFu) | 0x80008000u);
}

__device__ __forceinline__ void fetch_view(u32 view, const u32* x, int item) {
    const int image = item / STRIPS, top = 2 * (item % STRIPS * ROWS) - PAD_Y;
    for (int i = threadIdx.x; i < VIEW_WORDS; i += THREADS) {
        const int pixel = i / (IN_CHANNELS / 2), word = i % (IN_CHANNELS / 2);
        const int row = top - 1 + pixel / VIEW_COLUMNS, column = pixel % VIEW_COLUMNS - 1;
        const bool inside = row >= 0 && row < HEIGHT && column >= 0 && column < WIDTH;
        const int at = inside ? ((image * HEIGHT + row) * WIDTH + column) * (IN_CHANNELS / 2) + word : 0;
        copy_async_word(view + i * 4, x + at, inside);
    }
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv_pool(const u32* __restrict__ x, const u32* __restrict__ weight, const float* __restrict__ bias,
          u16* __restrict__ out, u8* __restrict__ place, int images) {
    const u32 view = shared_base(), convolved = view + (VIEW_WORDS * 4 + 15) / 16 * 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Factors are numbered tap by tap, as both a pixel's channels and a weight's lie in memory. This lane's: two
    // neighbours in each half of a step. Those beyond the last have a weight of zero, and look at the first tap.
    u32 weights[BLOCKS_OF_8][STEPS][2], from[STEPS][2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int factor = step * 16 + half * 8 + lane % 4 * 2, tap = factor < FACTORS ? factor / IN_CHANNELS : 0;
            from[step][half] = ((tap / 3 * VIEW_COLUMNS + tap % 3) * IN_CHANNELS + factor % IN_CHANNELS) * 2;
#pragma unroll
            for (int block = 0; block < BLOCKS_OF_8; ++block) {
                const int row = block * 8 + lane / 4;
                weights[block][step][half] = factor < FACTORS ? weight[(row * FACTORS + factor) / 2] : 0;
            }
        }

    if ((int)blockIdx.x < images * STRIPS) fetch_view(view, x, blockIdx.x);
    for (int item = blockIdx.x; item < images * STRIPS; item += gridDim.x) {
        const int image = item / STRIPS, first_row = item % STRIPS * ROWS, top = 2 * first_row - PAD_Y;
        copy_wait<0>();
        __syncthreads();

        for (int start = warp * 16; start < CONVOLVED_PIXELS; start += WARPS * 16) {
            int pixels[2];
            u32 windows[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                pixels[half] = start + half * 8 + lane / 4;
                const int pixel = pixels[half] < CONVOLVED_PIXELS ? pixels[half] : CONVOLVED_PIXELS - 1;
                windows[half] = view + (pixel / WIDTH * VIEW_COLUMNS + pixel % WIDTH) * IN_CHANNELS * 2;
            }
            float sums[BLOCKS_OF_8][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                Vec4 seen;
#pragma unroll
                for (int i = 0; i < 4; ++i) seen.v[i] = load_shared_word(windows[i % 2] + from[step][i / 2]);
#pragma unroll
                for (int block = 0; block < BLOCKS_OF_8; ++block)
                    multiply_add(sums[block], seen, weights[block][step][0], weights[block][step][1]);
            }
#pragma unroll
            for (int block = 0; block < BLOCKS_OF_8; ++block) {
                const int channel = block * 8 + lane % 4 * 2;
                const float low_bias = bias[channel], high_bias = bias[channel + 1];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // Rounded twice, as when both are written out.
                    const u32 sum = pack_bf16(sums[block][half * 2], sums[block][half * 2 + 1]);
                    const u32 biased = pack_bf16(from_bf16((u16)sum) + low_bias, from_bf16((u16)(sum >> 16)) + high_bias);
                    store_shared_word(convolved + pixels[half] * PIXEL + channel * 2, ordered(biased));
                }
            }
        }
        __syncthreads();
        if (item + (int)gridDim.x < images * STRIPS) fetch_view(view, x, item + gridDim.x);  // lands while these are pooled

        for (int i = threadIdx.x; i < ROWS * OUT_COLUMNS * BLOCKS_OF_8; i += THREADS) {
            const int block = i % BLOCKS_OF_8, column = i / BLOCKS_OF_8 % OUT_COLUMNS, row = i / BLOCKS_OF_8 / OUT_COLUMNS;
            if (first_row + row >= OUT_ROWS) break;
            u32 greatest[8] = {};  // the value, then how far from the window's end: of equals the first is the greatest
#pragma unroll
            for (int window = 0; window < 9; ++window) {
                // No branch, so that all reads are under way at once: outside, what is read counts as less than anything.
                const int y = 2 * row + window / 3, x_ = 2 * column - PAD_X + window % 3;
                const bool inside = top + y >= 0 && top + y < HEIGHT && x_ >= 0 && x_ < WIDTH;
                const Vec4 values = load_shared(convolved + (inside ? y * WIDTH + x_ : 0) * PIXEL + block * 16);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const u32 value = c % 2 ? values.v[c / 2] & 0xFFFF0000u : values.v[c / 2] << 16;
                    const u32 candidate = inside ? value | (8 - window) : 0;
                    greatest[c] = candidate > greatest[c] ? candidate : greatest[c];
                }
            }
            Vec4 result;
            Places places;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                if (c % 2) result.v[c / 2] = unordered(greatest[c - 1] >> 16 | (greatest[c] & 0xFFFF0000u));
                places.v[c] = (u8)(8 - (greatest[c] & 15));
            }
            const int at = ((image * OUT_ROWS + first_row + row) * OUT_COLUMNS + column) * OUT_CHANNELS + block * 8;
            *(Vec4*)(out + at) = result;
            *(Places*)(place + at) = places;
        }
    }
}
