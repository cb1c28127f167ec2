// A 3 x 3 convolution of 64 or 128 channels within a margin of zeros, channels last. By compile-time switches: of relu(x)
// (RELU_FIRST); + bias (BIAS); its ReLU (RELU), or zero where `gate` is not above it (GATE); + plus (PLUS). Each is
// rounded as when it is written out. What comes out is added up by channel and block (SUMS).
//
// A block makes TILES x 64 pixels, in flat order across rows and images, of BLOCK_CHANNELS channels; each of its four warps
// a fourth of the pixels. It holds every input pixel they need in shared memory; the nine taps read them there at constant
// offsets. Weights, which `pack` has laid out so (many.cu), pass by, those of a tap and DEPTH input channels at a time, of
// which STAGES are there or under way. Each block begins elsewhere among them: if all read the same at the same time, they
// would wait for each other at the one place of the second-level cache where it lies.
//
// Rows are held with a zero at their end, images with a row of zeros: these are the margins of what comes next, too.

constexpr int THREADS = 128, TAPS = 9, DEPTH = 64, STEPS = DEPTH / 16;
constexpr int PARTS = CHANNELS / DEPTH, PASSING = TAPS * PARTS;
constexpr int BLOCK_PIXELS = TILES * 64, BLOCKS_OF_8 = BLOCK_CHANNELS / 8, GROUPS = BLOCK_CHANNELS / 32;
constexpr int LINE = CHANNELS * 2 + 16;  // of a pixel: eight lie in different banks
constexpr int STAGE = DEPTH * BLOCK_CHANNELS * 2;
constexpr int BARRIERS = (STAGES * 8 + 127) / 128 * 128;
constexpr int PITCH = WIDTH + 1, IMAGE = (HEIGHT + 1) * PITCH, MARGIN = PITCH + 1;

// Where a pixel lies when rows and images have their zeros.
__device__ __forceinline__ int place_of(int pixel) {
    return pixel + pixel / WIDTH + pixel / (HEIGHT * WIDTH) * PITCH;
}

__device__ __forceinline__ void fetch_pixels(u32 view, const u16* x, int first, int count, int images) {
    constexpr int PIECES = CHANNELS / 8, ABREAST = THREADS / PIECES;  // a thread copies 16 bytes: so many pixels at once
    const int piece = threadIdx.x % PIECES, place = first + threadIdx.x / PIECES + IMAGE;  // not below zero
    int image = place / IMAGE - 1, row = place % IMAGE / PITCH, column = place % IMAGE % PITCH;
    for (int i = threadIdx.x / PIECES; i < count; i += ABREAST) {
        const bool inside = image >= 0 && image < images && row < HEIGHT && column < WIDTH;
        const size_t pixel = inside ? (image * HEIGHT + row) * WIDTH + column : 0;
        copy_async(view + i * LINE + piece * 16, x + pixel * CHANNELS + piece * 8, inside);
        for (column += ABREAST; column >= PITCH; column -= PITCH)
            if (++row > HEIGHT) row = 0, ++image;
    }
}

// Of a batch the first `first_images` go through `weight` and `bias`, the others through the second ones.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
conv_same(const u16* __restrict__ x, const u16* weight, const float* bias, const u16* second_weight,
          const float* second_bias, const u16* __restrict__ gate, const u16* __restrict__ plus, u16* __restrict__ out,
          float* __restrict__ sums_of_blocks, int images, int first_images) {
    constexpr int SIZE = HEIGHT * WIDTH;
    const u32 stages = shared_base(), barriers = stages + STAGES * STAGE, view = barriers + BARRIERS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block_channel = blockIdx.y * BLOCK_CHANNELS;
    const int first_blocks = (first_images * SIZE + BLOCK_PIXELS - 1) / BLOCK_PIXELS;
    const bool second = blockIdx.x >= first_blocks;
    const int total = (second ? images : first_images) * SIZE;
    const int block_first = second ? first_images * SIZE + (blockIdx.x - first_blocks) * BLOCK_PIXELS
                                   : blockIdx.x * BLOCK_PIXELS;
    const int block_last = (block_first + BLOCK_PIXELS < total ? block_first + BLOCK_PIXELS : total) - 1;
    const int origin = place_of(block_first), held = place_of(block_last) - origin + 2 * MARGIN + 1;
    if (second) weight = second_weight, bias = second_bias;
    weight += block_channel * (TAPS * CHANNELS);

    int fetched = blockIdx.x % PASSING, passing = fetched;
    prepare_barriers(barriers, STAGES);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        fetch_block(stages + stage * STAGE, weight + fetched * (STAGE / 2), STAGE, barriers + stage * 8);
        fetched = fetched + 1 < PASSING ? fetched + 1 : 0;
    }
    fetch_pixels(view, x, origin - MARGIN, held, images);
    copy_commit();

    u32 lines[TILES];  // of the first tap
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int pixel = block_first + i * 64 + warp * 16 + lane % 16;
        lines[i] = view + (place_of(pixel < total ? pixel : total - 1) - origin) * LINE + lane / 16 * 16;
    }

    float sums[TILES][BLOCKS_OF_8][4] = {};
    copy_wait<0>();
#pragma unroll 1
    for (int number = 0; number < PASSING; ++number) {
        const int stage = number % STAGES, next = number + STAGES - 1, place = next % STAGES;
        wait_for_block(barriers + stage * 8, number / STAGES);
        __syncthreads();  // all have these weights, and are done with those whose place is taken next
        if (next < PASSING)
            fetch_block(stages + place * STAGE, weight + fetched * (STAGE / 2), STAGE, barriers + place * 8);
        fetched = fetched + 1 < PASSING ? fetched + 1 : 0;

        const int tap = passing / PARTS;
        const u32 of_pixels = (tap / 3 * PITCH + tap % 3) * LINE + passing % PARTS * (DEPTH * 2);
        const u32 of_weights = stages + stage * STAGE;
        Vec4 seen[STEPS][TILES];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                seen[step][i] = load_matrices(lines[i] + of_pixels + step * 32);
                if (RELU_FIRST) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) seen[step][i].v[k] = relu_bf16(seen[step][i].v[k]);
                }
            }
            begin_products();
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                multiply_wide(sums[i], seen[step][i], of_weights + step * (BLOCK_CHANNELS * 32));
            end_products();
        }
        wait_for_products();
        passing = passing + 1 < PASSING ? passing + 1 : 0;
    }

    const int row = warp * 8 + lane / 4, column = lane % 4 * 8, first = block_first + warp * 16 + lane / 4;
    if (SUMS) __syncthreads();  // all are done with what lies in shared memory
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int channel = block_channel + group * 32 + column;
        float biases[8];
        if (BIAS) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                // Rounded where a library adds it, and not where bias_relu does.
                biases[c] = RELU ? bias[channel + c] : from_bf16((u16)pack_bf16(bias[channel + c], 0.0f));
            }
        }
        Vec4 gates[TILES * 2], added[TILES * 2];  // all reads are under way before the first is waited for
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) {
            const int wanted = first + i / 2 * 64 + i % 2 * 8, pixel = wanted < total ? wanted : total - 1;
            if (GATE) gates[i] = *(const Vec4*)(gate + (size_t)pixel * OUT_CHANNELS + channel);
            if (PLUS) added[i] = *(const Vec4*)(plus + (size_t)pixel * OUT_CHANNELS + channel);
        }
        float of_channels[8] = {};
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) {
            Vec4 result;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float* sum = sums[i / 2][group * 4 + k] + i % 2 * 2;
                u32 pair = pack_bf16(sum[0], sum[1]);
                if (BIAS) {
                    const float low = from_bf16((u16)pair) + biases[k * 2];
                    pair = pack_bf16(low, from_bf16((u16)(pair >> 16)) + biases[k * 2 + 1]);
                }
                if (RELU) pair = relu_bf16(pair);
                if (GATE) {
                    if (from_bf16((u16)gates[i].v[k]) <= 0.0f) pair &= 0xFFFF0000u;
                    if (from_bf16((u16)(gates[i].v[k] >> 16)) <= 0.0f) pair &= 0xFFFFu;
                }
                if (PLUS) {
                    const float low = from_bf16((u16)pair) + from_bf16((u16)added[i].v[k]);
                    pair = pack_bf16(low, from_bf16((u16)(pair >> 16)) + from_bf16((u16)(added[i].v[k] >> 16)));
                }
                result.v[k] = pair;
            }
            const int pixel = first + i / 2 * 64 + i % 2 * 8;
            if (pixel >= total) continue;
            *(Vec4*)(out + (size_t)pixel * OUT_CHANNELS + channel) = result;
            if (SUMS) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    of_channels[k * 2] += from_bf16((u16)result.v[k]);
                    of_channels[k * 2 + 1] += from_bf16((u16)(result.v[k] >> 16));
                }
            }
        }
        if (SUMS) {
#pragma unroll
            for (int c = 0; c < 8; ++c)
                store_shared_float(view + (row * BLOCK_CHANNELS + group * 32 + column + c) * 4, of_channels[c]);
        }
    }
    if (SUMS) {
        __syncthreads();
        if (threadIdx.x < BLOCK_CHANNELS) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 32; ++i) sum += load_shared_float(view + (i * BLOCK_CHANNELS + threadIdx.x) * 4);
            sums_of_blocks[blockIdx.x * OUT_CHANNELS + block_channel + threadIdx.x] = sum;
        }
    }
}
