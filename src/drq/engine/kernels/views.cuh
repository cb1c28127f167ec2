// A strip of a perturbed observation, rebuilt in shared memory from the single frames of the replay.
//
// out[y, x] = in[clamp(y + dy), clamp(x + dx)] for every channel; the channels of the STACK frames lie behind each
// other, padded to 16 with zeros. Pixels are bfloat16 0..255 (exact). Even and odd columns lie apart, so that a
// window of stride 2 reads neighbours; a pixel takes 48 bytes, which keeps ldmatrix free of bank conflicts, and odd
// columns start half a round of the banks after even ones, which keeps the stores free of them.
// H, W: size of a frame. A strip serves ROWS rows of the first layer's output.

constexpr int HO = (H - 3) / 2 + 1, WO = (W - 3) / 2 + 1;
constexpr int VIEW_PIXEL = 48;
constexpr int ODD = ((W + 1) / 2 * VIEW_PIXEL + 63) / 128 * 128 + 64;  // odd columns behind the even ones
constexpr int VIEW_ROW = 2 * ODD;
constexpr int VIEW_ROWS = 2 * ROWS + 1;
constexpr int VIEW_BYTES = VIEW_ROWS * VIEW_ROW;
constexpr int STRIPS = (HO + ROWS - 1) / ROWS;      // per image
constexpr int STRIP_PIXELS = ROWS * WO;

struct Views {
    const u8* frames;
    const SLOT* slots;
    const int* shifts;

    __device__ const u8* frame(int image, int s) const {
        return frames + (size_t)slots[image * STACK + s] * (FRAME_CHANNELS * H * W);
    }
    __device__ int top(int image, int strip) const { return 2 * strip * ROWS + shifts[image * 2]; }
};

__device__ __forceinline__ int clamped(int value, int size) { return value < 0 ? 0 : value < size ? value : size - 1; }

// With AHEAD: starts to copy the strip's rows of every frame to `bytes`, a channel's rows together. Needs W % 4 == 0.
__device__ __forceinline__ void fetch_bytes(u32 bytes, const Views& views, int image, int strip) {
    constexpr int ROW_WORDS = W / 4, FRAME_WORDS = FRAME_CHANNELS * VIEW_ROWS * ROW_WORDS;
    const int top = views.top(image, strip);
#pragma unroll
    for (int s = 0; s < STACK; ++s) {
        const u8* frame = views.frame(image, s);
        for (int i = threadIdx.x; i < FRAME_WORDS; i += THREADS) {
            int row = i / ROW_WORDS, channel = row / VIEW_ROWS, y = row - channel * VIEW_ROWS;
            int from = (channel * H + clamped(y + top, H)) * W + (i - row * ROW_WORDS) * 4;
            copy_async_word(bytes + (s * FRAME_WORDS + i) * 4, frame + from);
        }
    }
}

// From `bytes` with AHEAD, else from the frames themselves.
__device__ __forceinline__ void build_view(u32 view, u32 bytes, const Views& views, int image, int strip) {
    const u8* frames[STACK];
#pragma unroll
    for (int s = 0; s < STACK; ++s) frames[s] = views.frame(image, s);
    const int top = views.top(image, strip), left = views.shifts[image * 2 + 1];
#pragma unroll(AHEAD ? 1 : 2)
    for (int i = threadIdx.x; i < VIEW_ROWS * W; i += THREADS) {
        int y = i / W, x = i - y * W, column = clamped(x + left, W);
        int from = clamped(y + top, H) * W + column;
        u32 channels[16] = {};
#pragma unroll
        for (int c = 0; c < STACK * FRAME_CHANNELS; ++c)
            channels[c] = AHEAD ? load_shared_u8(bytes + (c * VIEW_ROWS + y) * W + column)
                                : frames[c / FRAME_CHANNELS][from + c % FRAME_CHANNELS * (H * W)];
        u32 to = view + y * VIEW_ROW + x % 2 * ODD + x / 2 * VIEW_PIXEL;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vec4 packed;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                packed.v[j] = pack_bytes(channels[half * 8 + j * 2], channels[half * 8 + j * 2 + 1]);
            store_shared(to + half * 16, packed);
        }
    }
}

// Shared-memory offset of the window's first tap under one output pixel of the strip, and of the other taps from there.
__device__ __forceinline__ int window(int pixel) {
    int y = pixel / WO;
    return 2 * y * VIEW_ROW + (pixel - y * WO) * VIEW_PIXEL;
}

__device__ __forceinline__ constexpr int tap_offset(int ky, int kx) {
    return ky * VIEW_ROW + (kx == 1 ? ODD : 0) + (kx == 2 ? VIEW_PIXEL : 0);
}
