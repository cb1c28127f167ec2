// The first layer, 3 x 3 with stride 2, straight from the replay: gather, shift, scale, convolution, bias and ReLU.
// NETS networks look at the same views; their outputs lie behind each other.

constexpr int WEIGHT_BYTES = TAPS * NETS * 1024;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
first(const u8* frames, const SLOT* slots, const int* shifts, u16* output, const float* weight_a, const float* bias_a,
      const float* weight_b, const float* bias_b, int images) {
    const u32 weights = shared_base(), view = weights + WEIGHT_BYTES, bytes = view + VIEW_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = images * STRIPS;
    const Views views = {frames, slots, shifts};
    auto fetch = [&](int item) {
        if (item < items) fetch_bytes(bytes, views, item / STRIPS, item % STRIPS);
        copy_commit();
    };
    if (AHEAD) fetch(blockIdx.x);
    constexpr int IN_CHANNELS = STACK * FRAME_CHANNELS;
    stage_weights<IN_CHANNELS, 16, NETS * 1024, false>(weights, weight_a);
    if (NETS == 2) stage_weights<IN_CHANNELS, 16, NETS * 1024, false>(weights + 1024, weight_b);

    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int image = item / STRIPS, strip = item - image * STRIPS;
        if (AHEAD) copy_wait<0>();
        __syncthreads();
        build_view(view, bytes, views, image, strip);
        __syncthreads();
        if (AHEAD) fetch(item + gridDim.x);
        const int rows_left = HO - strip * ROWS, count = (rows_left < ROWS ? rows_left : ROWS) * WO;
        for (int start = warp * MT * 16; start < count; start += WARPS * MT * 16) {
            u32 rows[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                int pixel = start + i * 16 + lane % 16;
                rows[i] = view + window(pixel < count ? pixel : count - 1) + lane / 16 * 16;
            }
            float sums[NETS][MT][4][4] = {};
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                Vec4 pixels[MT];
#pragma unroll
                for (int i = 0; i < MT; ++i) pixels[i] = load_matrices(rows[i] + tap_offset(tap / 3, tap % 3));
#pragma unroll
                for (int net = 0; net < NETS; ++net) {
                    u32 group = weights + (tap * NETS + net) * 1024 + lane * 16;
                    Vec4 w0 = load_shared(group), w1 = load_shared(group + 512);
#pragma unroll
                    for (int i = 0; i < MT; ++i) multiply_group(sums[net][i], pixels[i], w0, w1);
                }
            }
#pragma unroll
            for (int net = 0; net < NETS; ++net) {
                float bias[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) bias[j] = (net ? bias_b : bias_a)[lane % 4 * 8 + j];
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int pixel = start + i * 16 + half * 8 + lane / 4;
                        if (pixel >= count) continue;
                        size_t to = (size_t)(net * images + image) * (HO * WO) + strip * STRIP_PIXELS + pixel;
                        Vec4 result = activated(sums[net][i], half, 1.0f / 255.0f, bias);
                        *(Vec4*)(output + to * CHANNELS + lane % 4 * 8) = result;
                    }
                }
            }
        }
    }
}
