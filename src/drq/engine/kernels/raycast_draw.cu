// The ray caster on a GPU: one thread a sample, four a pixel, 8 x 4 pixels a block, many frames a launch.
//
// A thread shades what its own sample shows: samples of a pixel that show the same do so side by side, at no cost.

constexpr int WIDTH = 8, HEIGHT = 4, PIXELS = WIDTH * HEIGHT;
static_assert(THREADS == 4 * PIXELS, "a thread for each sample");

// Which triangle a sample shows, as a number; no two are the same.
DEVICE u32 key_of(const Hit& hit) {
    return hit.shape < 0 ? ~0u : (u32)hit.shape << 24 | hit.facet.row << 16 | hit.facet.column << 8 | hit.facet.half;
}

// The first sample of this thread's pixel that shows the same.
DEVICE int first_alike(u32* keys, const Hit& hit) {
    const int mine = threadIdx.x & 3, first = threadIdx.x - mine;
    __syncthreads();  // nobody reads the last keys any more
    keys[threadIdx.x] = key_of(hit);
    __syncthreads();
    int k = 0;
    while (k < mine && keys[first + k] != keys[first + mine]) ++k;
    return k;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const __grid_constant__ Assets assets, const Frame* frames, const Shape* shapes, u8* out) {
    __shared__ u8 seen[2][MAX_SHAPES];
    __shared__ int counts[2];
    __shared__ u32 exchanged[THREADS];
    const Frame& frame = frames[blockIdx.y];
    const Scene scene = {assets, frame, shapes + (size_t)blockIdx.y * MAX_SHAPES};
    const int tiles = (assets.size + WIDTH - 1) / WIDTH;
    const int left = blockIdx.x % tiles * WIDTH, bottom = blockIdx.x / tiles * HEIGHT;

    // A warp for each eye lists what the tile may show, in order.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 2) {
        int count = 0;
        for (int start = 0; start < frame.shapes && (warp == CAMERA || frame.mirror >= 0); start += 32) {
            int i = start + lane;
            bool in =
                i < frame.shapes && in_tile(scene, scene.shapes[i], warp, (float)left, (float)bottom, WIDTH, HEIGHT);
            u32 together = votes(in);
            if (in) seen[warp][count + count_bits(together & ((1u << lane) - 1))] = (u8)i;
            count += count_bits(together);
        }
        if (lane == 0) counts[warp] = count;
    }
    __syncthreads();
    const List lists[2] = {{seen[0], counts[0]}, {seen[1], counts[1]}};

    // A warp draws 4 x 2 pixels.
    const int sample = lane & 3, pixel = lane / 4;
    const int x = left + warp % 2 * 4 + pixel % 4, y = bottom + warp / 2 * 2 + pixel / 4;
    const bool inside = x < assets.size && y < assets.size;
    const float sx = (float)x + assets.samples[2 * sample], sy = (float)y + assets.samples[2 * sample + 1];
    Hit hit = {-1, frame.far, {0.0f, 0.0f, 0.0f}, {0, 0, 0}}, image = hit;
    if (inside) hit = cast(scene, lists[CAMERA], CAMERA, sx, sy, frame.near, -1);
    const bool mirrors = in_mirror(scene, hit);
    if (mirrors) image = cast(scene, lists[MIRRORED], MIRRORED, sx, sy, hit.depth, hit.shape);

    Rgb colour = {0, 0, 0};
    int k = first_alike(exchanged, hit);
    if (inside && hit.shape < 0) colour = sky_at(assets, frame, x, y);
    if (hit.shape >= 0)
        colour = shade(scene, scene.shapes[hit.shape], hit.facet, CAMERA, x, y, (float)x + assets.samples[2 * k],
                       (float)y + assets.samples[2 * k + 1]);
    k = first_alike(exchanged, image);
    if (mirrors) {
        Rgb shown = {0, 0, 0};
        if (image.shape >= 0)
            shown = shade(scene, scene.shapes[image.shape], image.facet, MIRRORED, x, y,
                          (float)x + assets.samples[2 * k], (float)y + assets.samples[2 * k + 1]);
        if (frame.transparent) shown = veiled(scene, MIRRORED, sx, sy, x, y, hit.depth, image.depth, hit.shape, shown);
        colour = colour + shown;
    }
    colour = saturated(colour);
    if (frame.transparent && inside) colour = veiled(scene, CAMERA, sx, sy, x, y, frame.near, hit.depth, -1, colour);

    __syncthreads();
    exchanged[threadIdx.x] = (u32)(colour.r | colour.g << 10 | colour.b << 20);
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * PIXELS; i += THREADS) {
        const int channel = i / PIXELS, column = i % WIDTH, row = i % PIXELS / WIDTH;
        if (left + column >= assets.size || bottom + row >= assets.size) continue;
        const int thread = (row / 2 * 2 + column / 4) * 32 + (row % 2 * 4 + column % 4) * 4;
        u32 sum = exchanged[thread] + exchanged[thread + 1] + exchanged[thread + 2] + exchanged[thread + 3];
        u8* place = out + ((size_t)blockIdx.y * 3 + channel) * assets.size * assets.size;
        place[(assets.size - 1 - bottom - row) * assets.size + left + column] =
            (u8)(((sum >> (10 * channel) & 1023) + 2) >> 2);
    }
}
