// The greatest of x + bias in windows of 3 x 3 pixels, two apart, and its gradient. The first
// windows begin with the image where its side is even, one pixel before it where it is odd.

struct alignas(WIDTH) Places {
    u8 v[WIDTH];
};

#if !GRADIENT

// `place`: where in its window, row by row, the greatest is.
extern "C" __global__ void __launch_bounds__(THREADS)
bias_pool(const Element* __restrict__ x, const float* __restrict__ bias, Element* __restrict__ out,
          u8* __restrict__ place, int batch, int height, int width) {
    const int pad_y = height % 2, pad_x = width % 2;
    const int rows = (height + 1) / 2, columns = (width + 1) / 2, count = batch * rows * columns * COLUMNS;
    for (int at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const int channels = at % COLUMNS, j = at / COLUMNS % columns, i = at / COLUMNS / columns % rows;
        const int image = at / COLUMNS / columns / rows;
        float greatest[WIDTH];
        Places places;
        bool first = true;
#pragma unroll
        for (int window = 0; window < 9; ++window) {
            const int y = 2 * i - pad_y + window / 3, x_ = 2 * j - pad_x + window % 3;
            if (y < 0 || y >= height || x_ < 0 || x_ >= width) continue;
            const Elements values = ((const Elements*)x)[((image * height + y) * width + x_) * COLUMNS + channels];
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) {
                // Rounded before they are compared, as when the sum is written out.
                const float value = as_float(as_element(as_float(values.v[c]) + bias[channels * WIDTH + c]));
                if (first || value > greatest[c] || value != value) {  // a NaN stays visible, as in PyTorch
                    greatest[c] = value;
                    places.v[c] = (u8)window;
                }
            }
            first = false;
        }
        Elements values;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) values.v[c] = as_element(greatest[c]);
        ((Elements*)out)[at] = values;
        ((Places*)place)[at] = places;
    }
}

#else

// A thread takes the 2 x 2 pixels where window (i, j) begins. All four are in that window, the upper two also in the one
// above it, the left two in the one to the left, the first in all four: what each passes on is gathered, in this order.
extern "C" __global__ void __launch_bounds__(THREADS)
bias_pool_gradient(const Element* __restrict__ gradient, const u8* __restrict__ place, Element* __restrict__ of_x,
                   int batch, int height, int width) {
    const int pad_y = height % 2, pad_x = width % 2;
    const int rows = (height + 1) / 2, columns = (width + 1) / 2, count = batch * rows * columns * COLUMNS;
    for (int at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const int channels = at % COLUMNS, j = at / COLUMNS % columns, i = at / COLUMNS / columns % rows;
        const int image = at / COLUMNS / columns / rows;
        float sums[4][WIDTH] = {};
#pragma unroll
        for (int up = 0; up < 2; ++up)
#pragma unroll
            for (int left = 0; left < 2; ++left) {
                if (up > i || left > j) continue;
                const int window = at - (up * columns + left) * COLUMNS;
                const Elements gradients = ((const Elements*)gradient)[window];
                const Places places = ((const Places*)place)[window];
#pragma unroll
                for (int pixel = 0; pixel < 4; ++pixel) {
                    const int y = pixel / 2 + 2 * up, x = pixel % 2 + 2 * left;  // in the window
                    if (y > 2 || x > 2) continue;
#pragma unroll
                    for (int c = 0; c < WIDTH; ++c)
                        if (places.v[c] == y * 3 + x) sums[pixel][c] += as_float(gradients.v[c]);
                }
            }
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) {
            const int y = 2 * i - pad_y + pixel / 2, x = 2 * j - pad_x + pixel % 2;
            if (y < 0 || y >= height || x < 0 || x >= width) continue;
            Elements values;
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) values.v[c] = as_element(sums[pixel][c]);
            ((Elements*)of_x)[((image * height + y) * width + x) * COLUMNS + channels] = values;
        }
    }
}

#endif
