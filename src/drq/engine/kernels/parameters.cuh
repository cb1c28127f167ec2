// Many parameters in one launch, a block for every ELEMENTS of one of them: PyTorch's own kernels give a block 65,536
// elements, which leaves half of a large GPU without work; here it is 4,096.

constexpr int ELEMENTS = THREADS * 4 * ROUNDS;

struct Parameter {
    float* weight;
    const float* gradient;
    float* mean;     // of the gradients
    float* square;   // mean of their squares
    float* step;     // how many were made
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
