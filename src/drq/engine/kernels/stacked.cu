// Stacked and shifted observations from the single frames of the replay, channels last, one thread a pixel.
// out[y, x] = in[clamp(y + dy), clamp(x + dx)] where SHIFTED. View n is of observation n modulo their number.

__device__ __forceinline__ int clamped(int value, int limit) {
    return value < 0 ? 0 : value >= limit ? limit - 1 : value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
stacked(const u8* frames, const long long* slots, const float* shifts, u8* out, int observations) {
    constexpr int PIXELS = H * W, CHANNELS = STACK * FRAME_CHANNELS;
    const int pixel = blockIdx.x * THREADS + threadIdx.x, view = blockIdx.y;
    if (pixel >= PIXELS) return;
    const int dy = SHIFTED ? (int)shifts[view * 2] : 0, dx = SHIFTED ? (int)shifts[view * 2 + 1] : 0;
    const int y = clamped(pixel / W + dy, H), x = clamped(pixel % W + dx, W);
    const long long* frame = slots + view % observations * STACK;
    u8* to = out + ((long long)view * PIXELS + pixel) * CHANNELS;
    for (int i = 0; i < STACK; ++i)
        for (int c = 0; c < FRAME_CHANNELS; ++c)
            to[i * FRAME_CHANNELS + c] = frames[((frame[i] * FRAME_CHANNELS + c) * H + y) * W + x];
}
