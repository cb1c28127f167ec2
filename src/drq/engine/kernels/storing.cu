// What is new in the replay, from page-locked memory of the host into the rings: a frame, the window and, where `slot`
// is not negative, a transition. The frame may be on the device already, or even in its slot. A thread moves one piece,
// so that the way over the bus is waited for once.

typedef long long i64;

extern "C" __global__ void __launch_bounds__(THREADS)
store(const PIECE* new_frame, const u32* new_row, const u32* new_place, const u32* new_window, PIECE* frames, u32* rows,
      u32* places, u32* windows, int slot, int frame_slot, int stream) {
    if (blockIdx.x > 0) {
        const int n = (blockIdx.x - 1) * THREADS + threadIdx.x;
        if (n < FRAME_PIECES) frames[(i64)frame_slot * FRAME_PIECES + n] = new_frame[n];
        return;
    }
    // Numbers of 8 bytes go as two words, like all the rest: then a warp reads all that it has to read at once.
    constexpr int PAIR = 4;  // words of a place, and of the window
    u32 *window = windows + stream * PAIR, *place = places + (i64)slot * PAIR, *row = rows + (i64)slot * COLUMNS;
    const int words = slot < 0 ? PAIR : 2 * PAIR + COLUMNS;
    for (int n = threadIdx.x; n < words; n += THREADS) {
        const u32* from = n < PAIR ? new_window + n : n < 2 * PAIR ? new_place + n - PAIR : new_row + n - 2 * PAIR;
        u32* to = n < PAIR ? window + n : n < 2 * PAIR ? place + n - PAIR : row + n - 2 * PAIR;
        *to = *from;
    }
}
