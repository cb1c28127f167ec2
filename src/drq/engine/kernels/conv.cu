// 3 x 3 convolution, stride 1, 32 to 32 channels, channels-last bfloat16.
//   FORWARD = 1: output = relu(conv(input) + bias)
//   FORWARD = 0: gradient of the layer's input, zero where `mask` (that input) is not above zero
// H, W: size of the layer's input. A block takes TILE output pixels in flat order, across rows and images, and holds
// every input pixel they need in shared memory once; the nine taps read it there at constant offsets.

constexpr int TILE = WARPS * MT * 16 * REPEAT;
constexpr int OUT_PIXELS = FORWARD ? HO * WO : H * W;  // per image
constexpr int STAGE = STAGE_PIXELS * PIXEL;
constexpr int WEIGHT_BYTES = TAPS * 2 * 1024;

// The input pixel under the window's first tap.
__device__ __forceinline__ int first_tap(int output) {
    int image = output / (HO * WO), rest = output - image * (HO * WO), y = rest / WO;
    return image * (H * W) + y * W + (rest - y * WO);
}

__device__ __forceinline__ void fetch(u32 stage, const u16* input, int tile, int images) {
    int first = tile * TILE;
    if (FORWARD) {
        int total = images * OUT_PIXELS, last = (first + TILE < total ? first + TILE : total) - 1;
        int from = first_tap(first);
        copy_pixels(stage, input, from, first_tap(last) + HALO + 1 - from, images * H * W);
    } else {
        copy_padded(stage, input, first - HALO, TILE + HALO, images);
    }
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv(const u16* input, u16* output, const u16* mask, const float* weight_a, const float* bias_a, const float* weight_b,
     const float* bias_b, int images) {
    const u32 weights = shared_base(), stages = weights + WEIGHT_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int total = images * OUT_PIXELS, tiles = (total + TILE - 1) / TILE;
    if (blockIdx.y) {  // the second network: its own images behind the first's, its own weights
        input += (size_t)images * H * W * CHANNELS;
        output += (size_t)total * CHANNELS;
        weight_a = weight_b, bias_a = bias_b;
    }
    int tile = blockIdx.x, stage = 0;
    if (tile < tiles) fetch(stages, input, tile, images);
    stage_weights<CHANNELS, CHANNELS, 2 * 1024, !FORWARD>(weights, weight_a);
    float bias[8] = {};
    if (FORWARD) {
#pragma unroll
        for (int j = 0; j < 8; ++j) bias[j] = bias_a[lane % 4 * 8 + j];
    }

#if HELD
    __syncthreads();
    Vec4 held[TAPS * 2][2];
#pragma unroll
    for (int group = 0; group < TAPS * 2; ++group) {
        held[group][0] = load_shared(weights + group * 1024 + lane * 16);
        held[group][1] = load_shared(weights + group * 1024 + lane * 16 + 512);
    }
#endif

    for (; tile < tiles; tile += gridDim.x) {
        const int next = tile + gridDim.x;
        if (STAGES == 2) {
            if (next < tiles) fetch(stages + (stage ^ 1) * STAGE, input, next, images);
            else copy_commit();
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();

        const u32 here = stages + stage * STAGE + lane / 16 * 16;
        const int origin = FORWARD ? first_tap(tile * TILE) : tile * TILE;
#pragma unroll 1
        for (int repeat = 0; repeat < REPEAT; ++repeat) {
            const int first = tile * TILE + (repeat * WARPS + warp) * MT * 16;
            u32 rows[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                int pixel = first + i * 16 + lane % 16;
                if (pixel >= total) pixel = total - 1;
                rows[i] = here + ((FORWARD ? first_tap(pixel) : pixel) - origin) * PIXEL;
            }
            const int mine = first + lane / 4;  // this lane writes eight channels of it and of every eighth pixel after
            Vec4 open[MT][2];
            if (!FORWARD && AHEAD) {  // the products hide how long this takes
#pragma unroll
                for (int i = 0; i < MT * 2; ++i) {
                    int pixel = mine + i * 8 < total ? mine + i * 8 : total - 1;
                    open[i / 2][i % 2] = *(const Vec4*)(mask + (size_t)pixel * CHANNELS + lane % 4 * 8);
                }
            }
            float sums[MT][4][4] = {};
#pragma unroll
            for (int group = 0; group < TAPS * 2; ++group) {
                const int offset = (group / 2 / 3 * W + group / 2 % 3) * PIXEL + group % 2 * 32;
#if HELD
                const Vec4 &w0 = held[group][0], &w1 = held[group][1];
#else
                u32 from = weights + group * 1024 + lane * 16;
                Vec4 w0 = load_shared(from), w1 = load_shared(from + 512);
#endif
#pragma unroll
                for (int i = 0; i < MT; ++i)
                    multiply_group(sums[i], load_matrices(rows[i] + offset), w0, w1);
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int pixel = mine + i * 16 + half * 8;
                    if (pixel >= total) continue;
                    size_t to = (size_t)pixel * CHANNELS + lane % 4 * 8;
                    Vec4 result;
                    if (FORWARD) {
                        result = activated(sums[i], half, 1.0f, bias);
                    } else {
                        if (!AHEAD) open[i][half] = *(const Vec4*)(mask + to);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            u32 pair = pack_bf16(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
                            result.v[j] = gated(pair, open[i][half].v[j]);
                        }
                    }
                    *(Vec4*)(output + to) = result;
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && next < tiles) fetch(stages, input, next, images);
        if (STAGES == 2) stage ^= 1;
    }
}
