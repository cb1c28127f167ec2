// Adam on many parameters in one launch; where AVERAGE, with a moving average of each, and with copies of both in
// bfloat16 where there are any: what has been read for the one is not read again for the other.

struct Rates {
    float mean, square;        // 1 - β
    float keep_square;         // β2
    float step, root, eps;     // what the quotient is multiplied by, and the root of the squares' mean
    float clip;                // what the gradient is multiplied by
    float keep;                // what the weight is multiplied by first, where weights decay
};

__device__ __forceinline__ void descend(float& weight, float gradient, float& mean, float& square, const Rates& r) {
    gradient = __fmul_rn(gradient, r.clip);  // rounded as if it had been clipped in memory
    mean += r.mean * (gradient - mean);
    square = r.keep_square * square + r.square * gradient * gradient;
#if DECAY
    weight = __fmul_rn(weight, r.keep);
#endif
    weight -= r.step * mean / (sqrtf(square) * r.root + r.eps);
}

#if AVERAGE
__device__ __forceinline__ void follow(float& average, float weight, float tau) {
    const float way = weight - average;
    average = tau < 0.5f ? average + tau * way : weight - way * (1.0f - tau);  // as PyTorch does it: all the way is exact
}

__device__ __forceinline__ void round_four(u16* copy, int at, const Four& from) {
    if (copy) *(RoundedFour*)(copy + at) = {pack_bf16(from.v[0], from.v[1]), pack_bf16(from.v[2], from.v[3])};
}
#endif

// Without a `coefficient` gradients are taken as they are.
extern "C" __global__ void __launch_bounds__(THREADS)
adam(const __grid_constant__ Parameters parameters, const float* coefficient, u32* counter, double rate, double beta1,
     double beta2, double eps, double decay, float tau) {
    const Parameter& p = own(parameters);
    // The means begin at zero; dividing by 1 - β^step makes up for it. In double, and once a block.
    const u32 shared = shared_base();
    if (threadIdx.x == 0) {
        const double step = *p.step + 1.0f;
        store_shared_float(shared, (float)(rate / (1.0 - pow(beta1, step))));
        store_shared_float(shared + 4, (float)(1.0 / sqrt(1.0 - pow(beta2, step))));
    }
    __syncthreads();
    const Rates rates = {(float)(1.0 - beta1), (float)(1.0 - beta2), (float)beta2,
                         load_shared_float(shared), load_shared_float(shared + 4), (float)eps,
                         coefficient ? *coefficient : 1.0f, p.decays ? (float)(1.0 - rate * decay) : 1.0f};
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = first_of_four(p, round);
        if (p.aligned && at + 4 <= p.size) {
            Four weight = *(Four*)(p.weight + at), mean = *(Four*)(p.mean + at), square = *(Four*)(p.square + at);
            const Four gradient = four_gradients_at(p, at);
#if AVERAGE
            Four average = *(const Four*)(p.average + at);
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i) descend(weight.v[i], gradient.v[i], mean.v[i], square.v[i], rates);
            *(Four*)(p.weight + at) = weight;
            *(Four*)(p.mean + at) = mean;
            *(Four*)(p.square + at) = square;
#if AVERAGE
#pragma unroll
            for (int i = 0; i < 4; ++i) follow(average.v[i], weight.v[i], tau);
            *(Four*)(p.average + at) = average;
            round_four(p.rounded, at, weight);
            round_four(p.rounded_average, at, average);
#endif
        } else {
            for (int i = at; i < at + 4 && i < p.size; ++i) {
                descend(p.weight[i], gradient_at(p, i), p.mean[i], p.square[i], rates);
#if AVERAGE
                follow(p.average[i], p.weight[i], tau);
                if (p.rounded) p.rounded[i] = (u16)pack_bf16(p.weight[i], 0.0f);
                if (p.rounded_average) p.rounded_average[i] = (u16)pack_bf16(p.average[i], 0.0f);
#endif
            }
        }
    }
    if (is_last_block(counter))  // then no other still has to read a step
        for (int i = threadIdx.x; i < parameters.count; i += THREADS) *parameters.of[i].step += 1.0f;
}
