// Second stage of a weight gradient: the blocks' partial sums added up, and put in the order of a PyTorch weight.
// A block takes 32 sums, one register of a warp; its 8 warps share the partial sums between them.
// IN_CHANNELS: without the padding.

extern "C" __global__ void __launch_bounds__(THREADS)
reduce(const float* partial, float* weight, float* bias, int parts, float scale) {
    const u32 scratch = shared_base();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (index < SUMS) {
#pragma unroll 8
        for (int part = warp; part < parts; part += WARPS) sum += partial[(size_t)part * SUMS + index];
    }
    store_shared_float(scratch + (warp * 32 + lane) * 4, sum);
    __syncthreads();
    if (warp || index >= SUMS) return;
    for (int other = 1; other < WARPS; ++other) sum += load_shared_float(scratch + (other * 32 + lane) * 4);
    if (index >= WEIGHT_SUMS) {
        bias[index - WEIGHT_SUMS] = sum;
        return;
    }
    // The register blockIdx.x of a multiplying warp: tap, half of the output channels, block of input channels, r.
    int r = blockIdx.x % 4, block = blockIdx.x / 4 % INPUT_BLOCKS, half = blockIdx.x / 4 / INPUT_BLOCKS % 2;
    int tap = blockIdx.x / 8 / INPUT_BLOCKS;
    int output = half * 16 + r / 2 * 8 + lane / 4, input = block * 8 + lane % 4 * 2 + r % 2;
    if (input < IN_CHANNELS) weight[(output * IN_CHANNELS + input) * TAPS + tap] = sum * scale;
}
