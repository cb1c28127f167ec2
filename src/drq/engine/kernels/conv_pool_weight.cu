// Gradients of the weights and biases of a 3 x 3 convolution of four channels, from that of the max-pool after it.
//
// A gradient of the pool belongs to the one pixel that was its window's greatest, at one of nine places. Place by
// place, what belongs elsewhere is masked: the weight gradient is then a product of gradients and input pixels, summed
// over windows, on the tensor cores. Most of the factors are zeros; but unpooled gradients, four times as many, are
// never written.
//
// Deterministic: a block adds its warps in a fixed order and writes one partial sum, and the second launch (SUM) adds
// the blocks' in a fixed order. Sums lie as registers hold them.

constexpr int THREADS = WARPS * 32, TAPS = 9, CHANNELS = 4, FACTORS = TAPS * CHANNELS;
constexpr int TILES = 5;                       // of 8 factors; the last half of the last one is ones, for the biases
constexpr int PER_LANE = OUTPUTS / 8;          // output channels, neighbours; OUTPUTS: of a warp
constexpr int ROWS_OF_16 = PER_LANE / 2;       // output channels as the tensor cores take them
constexpr int PARTS = OUT_CHANNELS / OUTPUTS;  // warps beside each other have the output channels between them
constexpr int OF_A_WARP = ROWS_OF_16 * TILES * 4 * 32, SUMS = PARTS * OF_A_WARP;

#if !SUM

constexpr int GROUPS = WARPS / PARTS;  // of such warps; what one that is left over has is not added
constexpr int PLACES = 9;
constexpr int PAD_Y = HEIGHT % 2, PAD_X = WIDTH % 2;  // as in pooling.cu
constexpr int OUT_ROWS = (HEIGHT + 1) / 2, OUT_COLUMNS = (WIDTH + 1) / 2, PAIRS = (OUT_COLUMNS + 1) / 2;
constexpr int SPAN = 5;                       // a window and the pixels next to it
constexpr int IMAGE_ROWS = 2 * OUT_ROWS + 3;  // that windows of one image and the pixels next to them reach

// Shared memory holds the input by channels, zeros around it, each row SPAN times: array s has column 2 j + s of the
// SPAN that window j sees, so that neighbouring windows make a word. PITCH, the words of one channel, puts the four
// channels and two taps that lanes read at once into different banks.
constexpr int SHIFT = CHANNELS * PITCH, ROW = SPAN * SHIFT;
constexpr int AHEAD = 6;  // words of each channel that a thread reads at once

struct alignas(8) Pixel {
    u32 v[2];
};
struct alignas(2 * PER_LANE) Gradients {
    u16 v[PER_LANE];
};
struct alignas(PER_LANE) Places {
    u8 v[PER_LANE];
};

// What a lane has of 16 windows: two pairs.
struct Windows {
    Gradients gradients[2][2];
    Places places[2][2];
};

// Of a row of the output, counted through all images, the first of the input's rows that it sees, likewise.
__device__ __forceinline__ int first_seen(int row) { return row / OUT_ROWS * IMAGE_ROWS + row % OUT_ROWS * 2; }

__device__ __forceinline__ Windows fetch(const u16* gradient, const u8* place, int first, int rows, int group,
                                         int part) {
    const int lane = threadIdx.x % 32;
    Windows windows = {};  // a gradient of zero where there is no window
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pair = group * 8 + half * 4 + lane % 4, row = pair / PAIRS, column = pair % PAIRS * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row >= rows || column + i >= OUT_COLUMNS) continue;
            const int window = (first + row) * OUT_COLUMNS + column + i;
            const int at = window * OUT_CHANNELS + part * OUTPUTS + lane / 4 * PER_LANE;
            windows.gradients[half][i] = *(const Gradients*)(gradient + at);
            windows.places[half][i] = *(const Places*)(place + at);
        }
    }
    return windows;
}

__device__ __forceinline__ void hold(u32 held, const Pixel* x, int begin, int count) {
    for (int start = threadIdx.x; start < count * SPAN * PAIRS; start += AHEAD * THREADS) {
        Pixel pixels[AHEAD][2] = {};  // all reads are under way before the first is waited for
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int i = start + ahead * THREADS, pair = i % PAIRS, shift = i / PAIRS % SPAN, row = i / (PAIRS * SPAN);
            const int image = (begin + row) / IMAGE_ROWS, y = (begin + row) % IMAGE_ROWS - PAD_Y - 1;
            if (row >= count || y < 0 || y >= HEIGHT) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = 4 * pair + 2 * j + shift - PAD_X - 1;
                if (column >= 0 && column < WIDTH) pixels[ahead][j] = x[(image * HEIGHT + y) * WIDTH + column];
            }
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int i = start + ahead * THREADS, pair = i % PAIRS, shift = i / PAIRS % SPAN, row = i / (PAIRS * SPAN);
            if (row >= count) continue;
            const u32 to = held + (row * ROW + shift * SHIFT + pair) * 4;
#pragma unroll
            for (int word = 0; word < 2; ++word) {
                const u32 one = pixels[ahead][0].v[word], other = pixels[ahead][1].v[word];
                store_shared_word(to + word * 2 * PITCH * 4, (one & 0xFFFFu) | other << 16);
                store_shared_word(to + (word * 2 + 1) * PITCH * 4, one >> 16 | (other & 0xFFFF0000u));
            }
        }
    }
}

// Its blocks have the `items` between them, each as many rows of the output, counted through all images.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv_pool_weight(const u16* __restrict__ gradient, const u8* __restrict__ place, const Pixel* __restrict__ x,
                 float* __restrict__ partial, int images, int items) {
    const u32 held = shared_base();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS;

    // Factors are numbered tap by tap. This lane's of each tile; those that are ones look at the last tap.
    u32 from[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int factor = tile * 8 + lane / 4, tap = factor < FACTORS ? factor / CHANNELS : TAPS - 1;
        from[tile] = (tap / 3 * ROW + tap % 3 * SHIFT + factor % CHANNELS * PITCH) * 4;
    }

    float sums[ROWS_OF_16][TILES][4] = {};
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const long long total = (long long)images * OUT_ROWS;
        const int first = (int)(total * item / items), rows = (int)(total * (item + 1) / items) - first;
        const int begin = first_seen(first), groups = (rows * PAIRS + 7) / 8;
        Windows next = fetch(gradient, place, first, rows, warp / PARTS, part);
        __syncthreads();  // the input of the item before has been read
        hold(held, x, begin, first_seen(first + rows - 1) + SPAN - begin);
        __syncthreads();

        for (int group = warp / PARTS; group < groups; group += GROUPS) {
            // As the tensor cores take them: an output channel a row, two windows a word.
            u32 gradients[ROWS_OF_16][4], places[ROWS_OF_16][4], seen[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Gradients(&values)[2] = next.gradients[half];
                const Places(&of_values)[2] = next.places[half];
#pragma unroll
                for (int i = 0; i < PER_LANE; ++i) {
                    gradients[i / 2][half * 2 + i % 2] = values[0].v[i] | (u32)values[1].v[i] << 16;
                    places[i / 2][half * 2 + i % 2] = of_values[0].v[i] | (u32)of_values[1].v[i] << 16;
                }
                const int pair = group * 8 + half * 4 + lane % 4, row = pair / PAIRS;
                seen[half] = held + (row < rows ? (first_seen(first + row) - begin) * ROW + pair % PAIRS : 0) * 4;
            }
            if (group + GROUPS < groups) next = fetch(gradient, place, first, rows, group + GROUPS, part);

#pragma unroll
            for (int window = 0; window < PLACES; ++window) {
                Vec4 belonging[ROWS_OF_16];
#pragma unroll
                for (int row = 0; row < ROWS_OF_16; ++row)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        belonging[row].v[i] = gradients[row][i] & same_halves(places[row][i], window * 0x00010001u);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const u32 at = from[tile] + (window / 3 * ROW + window % 3 * SHIFT) * 4;
                    u32 factors[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        factors[half] = load_shared_word(seen[half] + at);
                        if (tile * 8 + lane / 4 >= FACTORS) factors[half] = 0x3F803F80u;
                    }
#pragma unroll
                    for (int row = 0; row < ROWS_OF_16; ++row)
                        multiply_add(sums[row][tile], belonging[row], factors[0], factors[1]);
                }
            }
        }
    }

    __syncthreads();  // the input is no longer needed
#pragma unroll
    for (int row = 0; row < ROWS_OF_16; ++row)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = warp * OF_A_WARP + ((row * TILES + tile) * 4 + i) * 32 + lane;
                store_shared_float(held + at * 4, sums[row][tile][i]);
            }
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) sum += load_shared_float(held + (group * SUMS + i) * 4);
        partial[blockIdx.x * SUMS + i] = sum;
    }
}

#else

// A block takes 32 sums, one register of a warp; its warps share the partial sums between them.
extern "C" __global__ void __launch_bounds__(THREADS)
conv_pool_weight_sum(const float* __restrict__ partial, u16* __restrict__ weight, float* __restrict__ bias, int parts) {
    const u32 scratch = shared_base();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = warp; part < parts; part += WARPS) sum += partial[part * SUMS + blockIdx.x * 32 + lane];
    store_shared_float(scratch + threadIdx.x * 4, sum);
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum += load_shared_float(scratch + (other * 32 + lane) * 4);

    const int i = blockIdx.x % 4, tile = blockIdx.x / 4 % TILES, row = blockIdx.x / 4 / TILES;  // of 16, of all parts
    const int channel = (row / ROWS_OF_16 * 8 + lane / 4) * PER_LANE + row % ROWS_OF_16 * 2 + i / 2;
    const int factor = tile * 8 + lane % 4 * 2 + i % 2;
    if (factor < FACTORS) weight[channel * FACTORS + factor] = (u16)pack_bf16(sum, 0.0f);
    if (factor == FACTORS) bias[channel] = sum;
}

#endif
