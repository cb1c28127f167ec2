// A 3 x 3 convolution of 64 channels within a margin of zeros, channels last, where no gradient is asked for. By
// compile-time switches: of relu(x) (RELU_FIRST); + bias (BIAS); its ReLU (RELU); + plus (PLUS). Each is rounded as when
// it is written out.
//
// A block makes 224 pixels, in flat order across rows and images, of 64 channels; each of its four warps half of both. It
// holds every input pixel they need in shared memory; the nine taps read them there at constant offsets. Weights pass by,
// those of a tap at a time, of which STAGES are there or under way.
//
// Rows are held with a zero at their end, images with a row of zeros: these are the margins of what comes next, too.

constexpr int CHANNELS = 64, THREADS = 128, TAPS = 9, STEPS = CHANNELS / 16;
constexpr int TILES = 7, WARP_PIXELS = TILES * 16, BLOCK_PIXELS = 2 * WARP_PIXELS;
constexpr int WARP_CHANNELS = 32, BLOCKS_OF_8 = WARP_CHANNELS / 8, BLOCK_CHANNELS = 2 * WARP_CHANNELS;
constexpr int LINE = CHANNELS * 2 + 16;  // of a pixel, or of an output channel's weights: eight lie in different banks
constexpr int STAGES = 3, STAGE = BLOCK_CHANNELS * LINE;
constexpr int PITCH = WIDTH + 1, IMAGE = (HEIGHT + 1) * PITCH, MARGIN = PITCH + 1;
constexpr int PIECES = CHANNELS / 8, ABREAST = THREADS / PIECES;  // a thread copies 16 bytes: so many lines at once

// Where a pixel lies when rows and images have their zeros.
__device__ __forceinline__ int place_of(int pixel) {
    return pixel + pixel / WIDTH + pixel / (HEIGHT * WIDTH) * PITCH;
}

__device__ __forceinline__ void fetch_pixels(u32 view, const u16* x, int first, int count, int images) {
    const int piece = threadIdx.x % PIECES;
    for (int i = threadIdx.x / PIECES; i < count; i += ABREAST) {
        const int place = first + i, image = place / IMAGE, row = place % IMAGE / PITCH, column = place % IMAGE % PITCH;
        const bool inside = place >= 0 && image < images && row < HEIGHT && column < WIDTH;
        const size_t pixel = inside ? (image * HEIGHT + row) * WIDTH + column : 0;
        copy_async(view + i * LINE + piece * 16, x + pixel * CHANNELS + piece * 8, inside);
    }
}

// Output channels are dealt so that a lane ends up with eight neighbouring ones: 16 bytes to store.
__device__ __forceinline__ void fetch_weights(u32 stage, const u16* weight, int tap) {
    const int piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < BLOCK_CHANNELS; i += ABREAST) {
        const int channel = i + threadIdx.x / PIECES, line = channel / 32 * 32 + channel % 8 / 2 * 8 + channel / 8 % 4 * 2;
        const u16* from = weight + (channel * TAPS + tap) * CHANNELS + piece * 8;
        copy_async(stage + (line + channel % 2) * LINE + piece * 16, from, true);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
conv_same(const u16* __restrict__ x, const u16* __restrict__ weight, const float* __restrict__ bias,
          const u16* __restrict__ plus, u16* __restrict__ out, int images) {
    const u32 view = shared_base(), stages = view + VIEW_PIXELS * LINE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, total = images * (HEIGHT * WIDTH);
    const int block_first = blockIdx.x * BLOCK_PIXELS, block_channel = blockIdx.y * BLOCK_CHANNELS;
    const int block_last = (block_first + BLOCK_PIXELS < total ? block_first + BLOCK_PIXELS : total) - 1;
    const int origin = place_of(block_first), held = place_of(block_last) - origin + 2 * MARGIN + 1;
    const int first = block_first + warp / 2 * WARP_PIXELS, warp_channel = warp % 2 * WARP_CHANNELS;

    weight += (size_t)block_channel * TAPS * CHANNELS;
    fetch_pixels(view, x, origin - MARGIN, held, images);
#pragma unroll
    for (int tap = 0; tap < STAGES - 1; ++tap) {
        fetch_weights(stages + tap * STAGE, weight, tap);
        copy_commit();
    }

    u32 lines[TILES];  // of the first tap
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int pixel = first + i * 16 + lane % 16;
        lines[i] = view + (place_of(pixel < total ? pixel : total - 1) - origin) * LINE + lane / 16 * 16;
    }
    const u32 factors = stages + (warp_channel + lane / 16 * 8 + lane % 8) * LINE + lane / 8 % 2 * 16;

    float sums[TILES][BLOCKS_OF_8][4] = {};
#pragma unroll 1
    for (int tap = 0; tap < TAPS; ++tap) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // all have this tap's, and are done with those whose place is taken next
        const int next = tap + STAGES - 1;
        if (next < TAPS) fetch_weights(stages + next % STAGES * STAGE, weight, next);
        copy_commit();

        const u32 of_pixels = (tap / 3 * PITCH + tap % 3) * LINE;
        const u32 of_weights = factors + tap % STAGES * STAGE;
        Vec4 seen[2][TILES], weights[2][BLOCKS_OF_8 / 2];  // of this step and of the next
#pragma unroll
        for (int step = -1; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
#pragma unroll
                for (int i = 0; i < TILES; ++i)
                    seen[(step + 1) % 2][i] = load_matrices(lines[i] + of_pixels + (step + 1) * 32);
#pragma unroll
                for (int j = 0; j < BLOCKS_OF_8 / 2; ++j)
                    weights[(step + 1) % 2][j] = load_matrices(of_weights + j * (16 * LINE) + (step + 1) * 32);
            }
            if (step < 0) continue;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                Vec4 factor = seen[step % 2][i];
                if (RELU_FIRST) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) factor.v[k] = relu_bf16(factor.v[k]);
                }
#pragma unroll
                for (int j = 0; j < BLOCKS_OF_8; ++j) {
                    const Vec4& two = weights[step % 2][j / 2];
                    multiply_add(sums[i][j], factor, two.v[j % 2 * 2], two.v[j % 2 * 2 + 1]);
                }
            }
        }
    }

    const int channel = block_channel + warp_channel + lane % 4 * 8, mine = first + lane / 4;
    float biases[8];
    if (BIAS) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            // Rounded where a library adds it, and not where bias_relu does.
            biases[c] = RELU ? bias[channel + c] : from_bf16((u16)pack_bf16(bias[channel + c], 0.0f));
        }
    }
    Vec4 added[TILES * 2];  // all reads are under way before the first is waited for
    if (PLUS) {
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) {
            const int pixel = mine + i * 8 < total ? mine + i * 8 : total - 1;
            added[i] = *(const Vec4*)(plus + (size_t)pixel * OUT_CHANNELS + channel);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
        Vec4 result;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float* sum = sums[i / 2][k] + i % 2 * 2;
            u32 pair = pack_bf16(sum[0], sum[1]);
            if (BIAS) {
                const float low = from_bf16((u16)pair) + biases[k * 2];
                pair = pack_bf16(low, from_bf16((u16)(pair >> 16)) + biases[k * 2 + 1]);
            }
            if (RELU) pair = relu_bf16(pair);
            if (PLUS) {
                const float low = from_bf16((u16)pair) + from_bf16((u16)added[i].v[k]);
                pair = pack_bf16(low, from_bf16((u16)(pair >> 16)) + from_bf16((u16)(added[i].v[k] >> 16)));
            }
            result.v[k] = pair;
        }
        const int pixel = mine + i * 8;
        if (pixel < total) *(Vec4*)(out + (size_t)pixel * OUT_CHANNELS + channel) = result;
    }
}
