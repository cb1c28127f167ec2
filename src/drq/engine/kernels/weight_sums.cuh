// Sums of a weight gradient: how they leave the registers. Deterministic: a block adds its warps in a fixed order and
// writes one partial sum; `reduce` adds the blocks' partial sums in a fixed order.
//
// A warp holds the three taps of one kernel row. A block has three such warps per group, and GROUPS groups that share
// the block's pixels between them. Sums lie as registers hold them, so that a warp writes 128 bytes at a time: register
// after register, the 32 lanes of each together; `reduce` knows which weight that is.

constexpr int GROUPS = WARPS / 3;
constexpr int INPUT_BLOCKS = INPUTS / 8;            // INPUTS: input channels, padded
constexpr int WEIGHT_SUMS = TAPS * CHANNELS * INPUTS;
constexpr int SUMS = WEIGHT_SUMS + CHANNELS;        // and the bias
constexpr u32 ONES = 0x3F803F80u;                   // two bfloat16 ones: a product with them adds up pixels

struct WeightSums {
    float taps[3][2][INPUT_BLOCKS][4];
    float bias[2][4];
};

template <class Put> __device__ __forceinline__ void each_sum(const WeightSums& sums, int row, int lane, Put put) {
#pragma unroll
    for (int kx = 0; kx < 3; ++kx)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < INPUT_BLOCKS; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    put(((((row * 3 + kx) * 2 + i) * INPUT_BLOCKS + j) * 4 + r) * 32 + lane, sums.taps[kx][i][j][r]);
    if (row == 0 && lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 4; r += 2) put(WEIGHT_SUMS + i * 16 + r / 2 * 8 + lane / 4, sums.bias[i][r]);
    }
}

// `scratch`: SUMS floats of shared memory that nothing else uses any more.
__device__ __forceinline__ void write_sums(const WeightSums& sums, u32 scratch, float* partial, int row, int group,
                                           int lane) {
    for (int g = 0; g < GROUPS; ++g) {
        __syncthreads();
        if (g != group) continue;
        const bool first = g == 0, last = g == GROUPS - 1;
        each_sum(sums, row, lane, [&](int index, float value) {
            if (!first) value += load_shared_float(scratch + index * 4);
            if (last) partial[index] = value;
            else store_shared_float(scratch + index * 4, value);
        });
    }
}
