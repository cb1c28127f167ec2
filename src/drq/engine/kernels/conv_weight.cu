// Gradient of the weights and biases of a 3 x 3, stride 1, 32 to 32 channel layer.
// dW[ky, kx] = sum over input pixels g of dY[g - ky W - kx] (outer) X[g]: X is read once, dY on the padded grid.

constexpr int TILE = TILE_PIXELS;
constexpr int GRADIENT_BYTES = (TILE + HALO) * PIXEL;
constexpr int STAGE = GRADIENT_BYTES + TILE * PIXEL;

__device__ __forceinline__ void fetch(u32 stage, const u16* input, const u16* gradient, int tile, int images) {
    copy_padded(stage, gradient, tile * TILE - HALO, TILE + HALO, images);
    copy_pixels(stage + GRADIENT_BYTES, input, tile * TILE, TILE, images * H * W);
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv_weight(const u16* input, const u16* gradient, float* partial, int images) {
    const u32 stages = shared_base();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 3, group = threadIdx.x / 96;
    const int tiles = (images * H * W + TILE - 1) / TILE;
    const int in_eight = lane % 8, matrix = lane / 8;
    // Rows of ldmatrix are pixels, which both products sum over: hence the transposed loads.
    const u32 gradient_lane = (matrix / 2 * 8 + in_eight + (2 - row) * W) * PIXEL + matrix % 2 * 16;
    const u32 input_lane = GRADIENT_BYTES + (matrix % 2 * 8 + in_eight) * PIXEL + matrix / 2 * 16;
    WeightSums sums = {};

    int tile = blockIdx.x, stage = 0;
    if (tile < tiles) fetch(stages, input, gradient, tile, images);
    for (; tile < tiles; tile += gridDim.x) {
        const int next = tile + gridDim.x;
        if (STAGES == 2) {
            if (next < tiles) fetch(stages + (stage ^ 1) * STAGE, input, gradient, next, images);
            else copy_commit();
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        const u32 here = stages + stage * STAGE;
#pragma unroll 2
        for (int pixel = group * 16; pixel < TILE; pixel += GROUPS * 16) {
            const u32 from = here + pixel * PIXEL;
            Vec4 x[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) x[j] = load_matrices_transposed(from + input_lane + j * 32);
#pragma unroll
            for (int kx = 0; kx < 3; ++kx) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Vec4 dy = load_matrices_transposed(from + gradient_lane + (2 - kx) * PIXEL + i * 32);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        multiply_add(sums.taps[kx][i][j], dy, x[j / 2].v[j % 2 * 2], x[j / 2].v[j % 2 * 2 + 1]);
                    if (row == 0 && kx == 0) multiply_add(sums.bias[i], dy, ONES, ONES);
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && next < tiles) fetch(stages, input, gradient, next, images);
        if (STAGES == 2) stage ^= 1;
    }
    copy_wait<0>();
    write_sums(sums, stages, partial + (size_t)blockIdx.x * SUMS, row, group, lane);
}
