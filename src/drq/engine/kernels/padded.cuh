// Gradients of a 3 x 3 layer's output, laid on the grid of its input.
//
// The output (HO x WO) sits in the top left of an H x W grid whose last two rows and columns are zero. Flattened over
// all images, the output pixel that tap (ky, kx) connects to input pixel g is g - ky W - kx for every g: whatever
// falls off an edge lands on a zero of the row or the image before.

constexpr int HO = H - 2, WO = W - 2;
constexpr int HALO = 2 * W + 2;

// Grid pixels [first, first + count).
__device__ __forceinline__ void copy_padded(u32 destination, const u16* gradient, int first, int count, int images) {
    for (int i = threadIdx.x; i < count * 4; i += THREADS) {
        int pixel = i >> 2, chunk = i & 3, grid = first + pixel;
        int image = grid < 0 ? images : grid / (H * W);
        int rest = grid - image * (H * W), y = rest / W, x = rest - y * W;
        bool valid = image < images && y < HO && x < WO;
        size_t from = valid ? (size_t)((image * HO + y) * WO + x) * CHANNELS + chunk * 8 : 0;
        copy_async(destination + pixel * PIXEL + chunk * 16, gradient + from, valid);
    }
}
