// Transitions rebuilt from the replay's rings: which ones were drawn, their n-step returns, and the slots of their
// frames. One thread a transition. What `UniformSampler.choose` and `Replay.gather` say in some fifty small kernels.

typedef long long i64;

constexpr int REWARD = 0, DISCOUNT = 1, DONE = 2, ACTION = 3;  // columns of a row, as in drq/replay.py

// The frames of the stack whose newest is frame number `newest` of a ring that begins at `base`, `age` frames after the
// first of its episode.
__device__ __forceinline__ void stack(i64* slots, i64 base, i64 newest, i64 age, i64 frame_capacity) {
    for (int i = 0; i < STACK; ++i) {
        i64 back = STACK - 1 - i;
        i64 frame = newest - (back < age ? back : age);
        slots[i] = base + (frame + frame_capacity) % frame_capacity;
#if ZERO_STACK
        if (back > age) slots[i] = STREAMS * frame_capacity;  // which stays zero
#endif
    }
}

// The slot that random bits choose among all that may be sampled, stream after stream.
__device__ __forceinline__ i64 uniform(i64 random, const i64* windows, i64 capacity) {
    i64 total = 0;
    for (int stream = 0; stream < STREAMS; ++stream) total += windows[2 * stream + 1];
    i64 left = random % total;
    int stream = 0;
    for (; left >= windows[2 * stream + 1]; ++stream) left -= windows[2 * stream + 1];
    return stream * capacity + (windows[2 * stream] + left) % capacity;
}

// `chosen`: random bits where UNIFORM, else slots. `returns`: the longest length of a return, and gamma. Capacities are
// those of one stream.
extern "C" __global__ void __launch_bounds__(THREADS)
transitions(const i64* chosen, const i64* windows, const double* returns, const float* rows, const i64* places,
            void* action, float* rewards, float* discounts, i64* slots, i64* next_slots, i64* chosen_slots, int count,
            int capacity, int frame_capacity) {
    const int n = blockIdx.x * THREADS + threadIdx.x;
    if (n >= count) return;
#if UNIFORM
    const i64 slot = uniform(chosen[n], windows, capacity);
    chosen_slots[n] = slot;
#else
    const i64 slot = chosen[n];
#endif
    const i64 stream = slot / capacity, base = stream * capacity;
    const float gamma = (float)returns[1];
    const float* row = rows + slot * COLUMNS;
#if CONTINUOUS
    for (int i = 0; i < COLUMNS - ACTION; ++i) ((float*)action)[(i64)n * (COLUMNS - ACTION) + i] = row[ACTION + i];
#else
    ((i64*)action)[n] = (i64)row[ACTION];
#endif
    float reward = row[REWARD], discount = gamma * row[DISCOUNT];
    const int longest = (int)returns[0];
    int length = 1;
#if EARLY_BOOTSTRAP
    float before = 1.0f;  // the discount up to the last step of the return
    for (; length < longest && row[DONE] == 0.0f; ++length) {
        row = rows + (base + (slot - base + length) % capacity) * COLUMNS;
        before = discount;
        reward += discount * row[REWARD];
        discount *= gamma * row[DISCOUNT];
    }
    const bool whole = length == longest;
    const int ahead = whole ? length - 1 : length;
    if (whole) discount = gamma * before;
#else
    for (; length < longest && row[DONE] == 0.0f; ++length) {
        row = rows + (base + (slot - base + length) % capacity) * COLUMNS;
        reward += discount * row[REWARD];
        discount *= gamma * row[DISCOUNT];
    }
    const int ahead = length;
#endif
    rewards[n] = reward;
    discounts[n] = discount;
    const i64 frame = places[slot * 2], age = places[slot * 2 + 1], frames = stream * frame_capacity;
    stack(slots + (i64)n * STACK, frames, frame, age, frame_capacity);
    stack(next_slots + (i64)n * STACK, frames, frame + ahead, age + ahead, frame_capacity);
}
