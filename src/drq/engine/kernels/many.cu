// What is small and there for every layer, in one launch for all of them.

struct Layer {
    const void* from;
    void* to;
    int rows;
    int columns;
    int block_channels;
    int turned;
};

struct Layers {
    Layer of[MOST];
};

#if PACKING

// Weights [rows][TAPS][columns] as conv_same multiplies with them: by its blocks of output channels, by tap, and by DEPTH
// input channels, what it fetches at a time; in there by eight input channels, and by output channels, dealt so that a lane
// ends up with eight neighbouring ones. Rows are output channels. If they are `turned`, columns are, and taps are turned
// round: the gradient of a convolution's input is a convolution of that of its output by these. A block packs 32 x 32 of
// one tap and layer.
constexpr int TAPS = 9, SIDE = 32, DEPTH = 64, LINE = SIDE + 2;

extern "C" __global__ void __launch_bounds__(THREADS)
pack(const __grid_constant__ Layers layers) {
    const Layer& layer = layers.of[blockIdx.y];
    const int tap = blockIdx.x % TAPS, across = layer.columns / SIDE;
    const int first_row = blockIdx.x / TAPS / across * SIDE, first_column = blockIdx.x / TAPS % across * SIDE;
    const u32 tile = shared_base();
    if (first_row >= layer.rows) return;
    const u16* from = (const u16*)layer.from + ((first_row * TAPS) + tap) * layer.columns + first_column;
    for (int i = threadIdx.x; i < SIDE * SIDE; i += THREADS)
        store_shared_u16(tile + (i / SIDE * LINE + i % SIDE) * 2, from[i / SIDE * TAPS * layer.columns + i % SIDE]);
    __syncthreads();
    const int inputs = layer.turned ? layer.rows : layer.columns, block = layer.block_channels;
    for (int i = threadIdx.x; i < SIDE * SIDE / 8; i += THREADS) {
        const int out = i % SIDE, in = i / SIDE * 8;
        Vec4 eight;
        for (int k = 0; k < 4; ++k) {
            u32 pair[2];
            for (int half = 0; half < 2; ++half) {
                const int at = in + k * 2 + half;
                pair[half] = load_shared_u16(tile + (layer.turned ? at * LINE + out : out * LINE + at) * 2);
            }
            eight.v[k] = pair[0] | pair[1] << 16;
        }
        const int output = out + (layer.turned ? first_column : first_row), channel = output % block;
        const int input = in + (layer.turned ? first_row : first_column);
        const int line = channel / 32 * 32 + channel % 8 / 2 * 8 + channel / 8 % 4 * 2 + channel % 2;
        const int fetched = (output / block * TAPS + (layer.turned ? TAPS - 1 - tap : tap)) * (inputs / DEPTH) + input / DEPTH;
        ((Vec4*)layer.to)[(fetched * (DEPTH / 8) + input % DEPTH / 8) * block + line] = eight;
    }
}

#else

// The sums of all rows [rows][columns], always added in the same order. A block adds 32 columns of a layer; every 32
// threads every THREADS / 32th row.
extern "C" __global__ void __launch_bounds__(THREADS)
add_rows(const __grid_constant__ Layers layers) {
    constexpr int GROUPS = THREADS / 32;
    const Layer& layer = layers.of[blockIdx.y];
    const int column = blockIdx.x * 32 + threadIdx.x % 32, group = threadIdx.x / 32;
    const u32 scratch = shared_base();
    if (blockIdx.x * 32 >= layer.columns) return;
    float sum = 0.0f;
    if (column < layer.columns) {
#pragma unroll 4
        for (int row = group; row < layer.rows; row += GROUPS) sum += ((const float*)layer.from)[row * layer.columns + column];
    }
    store_shared_float(scratch + threadIdx.x * 4, sum);
    __syncthreads();
    if (group == 0 && column < layer.columns) {
        for (int i = 1; i < GROUPS; ++i) sum += load_shared_float(scratch + (i * 32 + threadIdx.x) * 4);
        ((float*)layer.to)[column] = sum;
    }
}

#endif
