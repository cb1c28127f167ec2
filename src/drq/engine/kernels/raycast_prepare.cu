// Makes frames ready to be drawn by raycast_draw.cu: fetches what the host has packed, one block a frame, so that it
// crosses the bus once, and works out what all pixels share.

static_assert(sizeof(Frame) == FRAME_BYTES && sizeof(Shape) == SHAPE_BYTES, "room for what is made ready");

DEVICE void fetch(u32* to, const void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 4; i += THREADS) to[i] = ((const u32*)from)[i];
}

// `geoms` and `shapes` have MAX_SHAPES places for each frame. No frame has more than `largest` geoms.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(const __grid_constant__ Assets assets, const FrameWords* words, const GeomWords* geoms, int largest,
            Frame* frames, Shape* shapes) {
    __shared__ u32 frame_words[sizeof(FrameWords) / 4], geom_words[MAX_SHAPES * sizeof(GeomWords) / 4];
    const int n = blockIdx.x;
    fetch(frame_words, words + n, sizeof(FrameWords));
    fetch(geom_words, geoms + (size_t)n * MAX_SHAPES, largest * sizeof(GeomWords));
    __syncthreads();
    const FrameWords& given = *(const FrameWords*)frame_words;
    const GeomWords* of = (const GeomWords*)geom_words;
    if (threadIdx.x == 0) prepare_frame(assets, given, of, frames[n]);
    __syncthreads();
    for (int i = threadIdx.x; i < given.geoms; i += THREADS)
        prepare_shape(assets, frames[n], of[i], shapes[(size_t)n * MAX_SHAPES + i]);
}
