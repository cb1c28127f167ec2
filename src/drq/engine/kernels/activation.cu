// relu(x + bias) in one launch, and its two gradients in another. Channels last: memory is rows, a pixel each, of
// CHANNELS values.

#if !GRADIENT

// `counter` is for the launch that will differentiate this one: zeroed here, it costs no launch of its own.
extern "C" __global__ void __launch_bounds__(THREADS)
bias_relu(const Element* __restrict__ x, const float* __restrict__ bias, Element* __restrict__ out,
          u32* __restrict__ counter, int rows) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
    const size_t count = (size_t)rows * COLUMNS, stride = (size_t)gridDim.x * THREADS;
    for (size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x; at < count; at += stride) {
        Elements values = ((const Elements*)x)[at];
        const float* of_column = bias + at % COLUMNS * WIDTH;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float sum = as_float(values.v[i]) + of_column[i];
            values.v[i] = as_element(sum < 0.0f ? 0.0f : sum);  // a NaN stays one, as in PyTorch
        }
        ((Elements*)out)[at] = values;
    }
}

#else

constexpr int ABREAST = COLUMNS < THREADS ? COLUMNS : THREADS;  // columns a block takes at once,
constexpr int GROUPS = THREADS / ABREAST;                       // of so many pixels

struct alignas(sizeof(float) * WIDTH) Sums {
    float v[WIDTH];
};

// Adds the groups' sums of every channel, always in the same order. Called by all threads; threads of no group have
// nothing to add.
__device__ __forceinline__ void add_groups(const Sums& sums, int first_column, float* total) {
    const u32 scratch = shared_base();
    __syncthreads();  // what was added last has been read
    if (threadIdx.x < GROUPS * ABREAST) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) store_shared_float(scratch + (threadIdx.x * WIDTH + i) * 4, sums.v[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ABREAST * WIDTH; i += THREADS) {
        const int channel = first_column * WIDTH + i;
        if (channel >= CHANNELS) break;
        float sum = 0.0f;
#pragma unroll 8
        for (int group = 0; group < GROUPS; ++group)
            sum += load_shared_float(scratch + (group * ABREAST * WIDTH + i) * 4);
        total[channel] = sum;
    }
}

// Deterministic: a block writes the bias gradient of its pixels to `partial`, and the last one adds these in a fixed
// order. `partial` is not __restrict__, because other blocks write what that one reads.
extern "C" __global__ void __launch_bounds__(THREADS)
bias_relu_gradient(const Element* __restrict__ gradient, const Element* __restrict__ out, Element* __restrict__ of_x,
                   float* of_bias, float* partial, u32* counter, int rows) {
    const int group = threadIdx.x / ABREAST, lane = threadIdx.x % ABREAST;
    const int stride = gridDim.x * (GROUPS * ROUNDS);
    for (int first_column = 0; first_column < COLUMNS; first_column += ABREAST) {
        const int column = first_column + lane;
        Sums sums = {};
        if (group < GROUPS && column < COLUMNS) {
            for (int first = blockIdx.x * (GROUPS * ROUNDS) + group; first < rows; first += stride) {
                Elements gradients[ROUNDS], outs[ROUNDS];  // all reads are under way before the first is waited for
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) {
                    const int row = first + round * GROUPS;
                    if (row >= rows) continue;
                    gradients[round] = ((const Elements*)gradient)[(size_t)row * COLUMNS + column];
                    outs[round] = ((const Elements*)out)[(size_t)row * COLUMNS + column];
                }
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) {
                    const int row = first + round * GROUPS;
                    if (row >= rows) continue;
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) {
                        if (as_float(outs[round].v[i]) <= 0.0f) gradients[round].v[i] = as_element(0.0f);
                        sums.v[i] += as_float(gradients[round].v[i]);
                    }
                    ((Elements*)of_x)[(size_t)row * COLUMNS + column] = gradients[round];
                }
            }
        }
        add_groups(sums, first_column, partial + (size_t)blockIdx.x * CHANNELS);
    }
    if (!is_last_block(counter)) return;
    for (int first_column = 0; first_column < COLUMNS; first_column += ABREAST) {
        const int column = first_column + lane;
        Sums sums = {};
        if (group < GROUPS && column < COLUMNS) {
#pragma unroll 4
            for (int part = group; part < gridDim.x; part += GROUPS) {
                const Sums other = ((const Sums*)partial)[(size_t)part * COLUMNS + column];
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sums.v[i] += other.v[i];
            }
        }
        add_groups(sums, first_column, of_bias);
    }
}

#endif
