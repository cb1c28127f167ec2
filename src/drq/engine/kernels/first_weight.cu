// Gradient of the first layer's weights and biases. The views are rebuilt from the frames, never stored.

constexpr int STEPS = (STRIP_PIXELS + 15) / 16;
constexpr int GRADIENT_BYTES = STEPS * 16 * PIXEL;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
first_weight(const u8* frames, const SLOT* slots, const int* shifts, const u16* gradient, float* partial, int images) {
    const u32 stages = shared_base(), view = stages + (1 + AHEAD) * GRADIENT_BYTES, bytes = view + VIEW_BYTES;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 3, group = threadIdx.x / 96;
    const int in_eight = lane % 8, matrix = lane / 8;
    const int items = images * STRIPS;
    const Views views = {frames, slots, shifts};
    WeightSums sums = {};
    auto pixels = [](int strip) { return (HO - strip * ROWS < ROWS ? HO - strip * ROWS : ROWS) * WO; };
    auto fetch = [&](u32 stage, int item) {
        if (item >= items) return;
        const int image = item / STRIPS, strip = item - image * STRIPS;
        const u16* from = gradient + (size_t)(image * (HO * WO) + strip * STRIP_PIXELS) * CHANNELS;
        copy_pixels(stage, from, 0, STEPS * 16, pixels(strip));
        if (AHEAD) fetch_bytes(bytes, views, image, strip);
        copy_commit();
    };

    u32 gradients = stages;
    if (AHEAD) fetch(gradients, blockIdx.x);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int image = item / STRIPS, strip = item - image * STRIPS, count = pixels(strip);
        if (AHEAD) copy_wait<0>();
        __syncthreads();
        if (!AHEAD) fetch(gradients, item);
        build_view(view, bytes, views, image, strip);
        if (!AHEAD) copy_wait<0>();
        __syncthreads();
        const u32 other = gradients == stages ? stages + AHEAD * GRADIENT_BYTES : stages;
        if (AHEAD) fetch(other, item + gridDim.x);
        for (int pixel = group * 16; pixel < count; pixel += GROUPS * 16) {
            int mine = pixel + matrix % 2 * 8 + in_eight;
            const u32 from = view + window(mine < count ? mine : count - 1) + matrix / 2 * 16;
            Vec4 dy[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                dy[i] = load_matrices_transposed(gradients + (pixel + matrix / 2 * 8 + in_eight) * PIXEL +
                                                 matrix % 2 * 16 + i * 32);
#pragma unroll
            for (int kx = 0; kx < 3; ++kx) {
                Vec4 x = load_matrices_transposed(from + row * VIEW_ROW + tap_offset(0, kx));
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) multiply_add(sums.taps[kx][i][j], dy[i], x.v[j * 2], x.v[j * 2 + 1]);
            }
            if (row == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) multiply_add(sums.bias[i], dy[i], ONES, ONES);
            }
        }
        gradients = other;
    }
    write_sums(sums, stages, partial + (size_t)blockIdx.x * SUMS, row, group, lane);
}
