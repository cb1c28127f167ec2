// Adam on many parameters in one launch. PyTorch's own gives a block 65,536 elements, which leaves half of a large GPU
// without work; here it is 4,096.

struct Parameter {
    float* weight;
    const float* gradient;
    float* mean;     // of the gradients
    float* square;   // mean of their squares
    const float* step;
    int size;
    int first_block;
    int aligned;     // whether four elements can be read at once
};

struct Parameters {
    Parameter of[MAX_PARAMETERS];
    int count;
};

struct alignas(16) Four {
    float v[4];
};

struct Rates {
    float mean, square;        // 1 - β
    float keep_square;         // β2
    float step, root, eps;     // what the quotient is multiplied by, and the root of the squares' mean
};

__device__ __forceinline__ void descend(float& weight, float gradient, float& mean, float& square, const Rates& r) {
    mean += r.mean * (gradient - mean);
    square = r.keep_square * square + r.square * gradient * gradient;
    weight -= r.step * mean / (sqrtf(square) * r.root + r.eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
adam(const __grid_constant__ Parameters parameters, double rate, double beta1, double beta2, double eps) {
    int index = 0;
    while (index + 1 < parameters.count && parameters.of[index + 1].first_block <= blockIdx.x) ++index;
    const Parameter& p = parameters.of[index];
    // The means begin at zero; dividing by 1 - β^step makes up for it. In double, and once a block.
    const u32 shared = shared_base();
    if (threadIdx.x == 0) {
        double step = *p.step;
        store_shared_float(shared, (float)(rate / (1.0 - pow(beta1, step))));
        store_shared_float(shared + 4, (float)(1.0 / sqrt(1.0 - pow(beta2, step))));
    }
    __syncthreads();
    const Rates rates = {(float)(1.0 - beta1), (float)(1.0 - beta2), (float)beta2,
                         load_shared_float(shared), load_shared_float(shared + 4), (float)eps};

    const int first = (blockIdx.x - p.first_block) * (THREADS * 4 * ROUNDS) + threadIdx.x * 4;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = first + round * THREADS * 4;
        if (p.aligned && at + 4 <= p.size) {
            Four weight = *(Four*)(p.weight + at), mean = *(Four*)(p.mean + at), square = *(Four*)(p.square + at);
            const Four gradient = *(const Four*)(p.gradient + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) descend(weight.v[i], gradient.v[i], mean.v[i], square.v[i], rates);
            *(Four*)(p.weight + at) = weight;
            *(Four*)(p.mean + at) = mean;
            *(Four*)(p.square + at) = square;
        } else {
            for (int i = at; i < at + 4 && i < p.size; ++i)
                descend(p.weight[i], p.gradient[i], p.mean[i], p.square[i], rates);
        }
    }
}
