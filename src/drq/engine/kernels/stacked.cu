// Stacked and shifted observations from the single frames of the replay, channels last, one thread a pixel.
// out[y, x] = in[clamp(y + dy), clamp(x + dx)] where SHIFTED, as bytes; where MULTIPLIED, that times 1 + scale * r, as
// floats. View n is of observation n modulo their number; its row of ν is dy, dx, r, as far as they are used.

#if MULTIPLIED
typedef float Value;
#else
typedef u8 Value;
#endif

constexpr int PIXELS = H * W, CHANNELS = STACK * FRAME_CHANNELS;

// Whole fours of channels are written four at a time.
struct alignas(CHANNELS % 4 ? sizeof(Value) : 4 * sizeof(Value)) Pixel {
    Value v[CHANNELS];
};

__device__ __forceinline__ int clamped(int value, int limit) {
    return value < 0 ? 0 : value >= limit ? limit - 1 : value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
stacked(const u8* frames, const long long* slots, const float* nu, int columns, float scale, Pixel* out,
        int observations) {
    const int index = blockIdx.x * THREADS + threadIdx.x, view = blockIdx.y;
    if (index >= PIXELS) return;
    nu += view * columns;
    const int dy = SHIFTED ? (int)nu[0] : 0, dx = SHIFTED ? (int)nu[1] : 0;
    const int y = clamped(index / W + dy, H), x = clamped(index % W + dx, W);
    const long long* frame = slots + view % observations * STACK;
    // Not fused, and so rounded as PyTorch does.
    const float factor = MULTIPLIED ? __fadd_rn(1.0f, __fmul_rn(scale, nu[SHIFTED * 2])) : 1.0f;
    Pixel pixel;
#pragma unroll
    for (int i = 0; i < STACK; ++i)
#pragma unroll
        for (int c = 0; c < FRAME_CHANNELS; ++c) {
            const u8 byte = frames[((frame[i] * FRAME_CHANNELS + c) * H + y) * W + x];
            pixel.v[i * FRAME_CHANNELS + c] = MULTIPLIED ? (Value)(byte * factor) : (Value)byte;
        }
    out[(long long)view * PIXELS + index] = pixel;
}
