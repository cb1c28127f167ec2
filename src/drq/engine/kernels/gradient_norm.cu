// The norm of all gradients, and what clipping multiplies them by: each block adds up its squares, the last one the
// blocks' sums. Always in the same order, so that equal gradients give equal bits.

// The sum over the block's threads, in the first of them.
__device__ __forceinline__ float block_sum(float value) {
    const u32 mine = shared_base() + threadIdx.x * 4;
    store_shared_float(mine, value);
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) store_shared_float(mine, load_shared_float(mine) + load_shared_float(mine + half * 4));
    }
    return load_shared_float(mine);
}

// `sums` has a place for every block of all launches: the first `done` are of earlier ones. Only the last launch is
// given a `norm`; behind it lies the coefficient.
extern "C" __global__ void __launch_bounds__(THREADS)
gradient_norm(const __grid_constant__ Parameters parameters, float* sums, int done, float* norm, float max_norm,
              u32* counter) {
    const Parameter& p = own(parameters);
    float sum = 0.0f;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = first_of_four(p, round);
        if (p.aligned && at + 4 <= p.size) {
            const Four gradient = four_gradients_at(p, at);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += gradient.v[i] * gradient.v[i];
        } else {
            for (int i = at; i < at + 4 && i < p.size; ++i) sum += gradient_at(p, i) * gradient_at(p, i);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[done + blockIdx.x] = sum;
    if (!is_last_block(counter) || !norm) return;
    sum = 0.0f;
    for (int i = threadIdx.x; i < done + gridDim.x; i += THREADS) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        norm[0] = sqrtf(sum);
        const float coefficient = max_norm / (norm[0] + 1e-6f);
        norm[1] = coefficient > 1.0f ? 1.0f : coefficient;  // what is not a number stays so, as in PyTorch
    }
}
