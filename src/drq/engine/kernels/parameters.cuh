// Many parameters in one launch, a block for every ELEMENTS of one of them: PyTorch's own kernels give a block 65,536
// elements, which leaves half of a large GPU without work; here it is 4,096.

constexpr int ELEMENTS = THREADS * 4 * ROUNDS;

struct Parameter {
    float* weight;
    const void* gradient;  // of bfloat16 where there is a rounded copy, else of float
    float* mean;     // of the gradients
    float* square;   // mean of their squares
    float* step;     // how many were made
#if AVERAGE
    float* average;        // of the weights
    u16* rounded;          // the weight in bfloat16, or none
    u16* rounded_average;  // the average in bfloat16, or none
#endif
    int size;
    int first_block;
    int aligned;     // whether four elements can be read at once
    int decays;      // whether weight decay is for it
};

struct Parameters {
    Parameter of[MAX_PARAMETERS];
    int count;
};

struct alignas(16) Four {
    float v[4];
};

struct alignas(8) RoundedFour {
    u32 v[2];
};

__device__ __forceinline__ float gradient_at(const Parameter& p, int at) {
#if AVERAGE
    if (p.rounded) return from_bf16(((const u16*)p.gradient)[at]);
#endif
    return ((const float*)p.gradient)[at];
}

__device__ __forceinline__ Four four_gradients_at(const Parameter& p, int at) {
#if AVERAGE
    if (p.rounded) {
        const RoundedFour r = *(const RoundedFour*)((const u16*)p.gradient + at);
        return {from_bf16((u16)r.v[0]), from_bf16((u16)(r.v[0] >> 16)), from_bf16((u16)r.v[1]),
                from_bf16((u16)(r.v[1] >> 16))};
    }
#endif
    return *(const Four*)((const float*)p.gradient + at);
}

// The parameter that this block works on.
__device__ __forceinline__ const Parameter& own(const Parameters& parameters) {
    int index = 0;
    while (index + 1 < parameters.count && parameters.of[index + 1].first_block <= blockIdx.x) ++index;
    return parameters.of[index];
}

// The first of the four elements that this thread works on in a round.
__device__ __forceinline__ int first_of_four(const Parameter& p, int round) {
    return (blockIdx.x - p.first_block) * ELEMENTS + (round * THREADS + threadIdx.x) * 4;
}
