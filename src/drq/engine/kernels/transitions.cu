// Transitions rebuilt from the replay's rings: which ones were drawn, their n-step returns, and the slots of their
// frames. One thread a transition. What `Replay.slots` and `Replay.gather` say in some forty small kernels.

typedef long long i64;

constexpr int REWARD = 0, DISCOUNT = 1, DONE = 2, ACTION = 3;  // columns of a row, as in drq/replay.py

// The frames of the stack whose newest is frame number `newest`, `age` frames after the first of its episode.
__device__ __forceinline__ void stack(i64* slots, i64 newest, i64 age, i64 frame_capacity) {
    for (int i = 0; i < STACK; ++i) {
        i64 back = STACK - 1 - i;
        i64 frame = newest - (back < age ? back : age);
        slots[i] = (frame + frame_capacity) % frame_capacity;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
transitions(const i64* random, const i64* window, const float* rows, const i64* places, void* action, float* rewards,
            float* discounts, i64* slots, i64* next_slots, int count, int capacity, int frame_capacity, double gamma) {
    const int n = blockIdx.x * THREADS + threadIdx.x;
    if (n >= count) return;
    const i64 slot = (window[0] + random[n] % window[1]) % capacity;
    const float* row = rows + slot * COLUMNS;
#if CONTINUOUS
    for (int i = 0; i < COLUMNS - ACTION; ++i) ((float*)action)[(i64)n * (COLUMNS - ACTION) + i] = row[ACTION + i];
#else
    ((i64*)action)[n] = (i64)row[ACTION];
#endif
    float reward = row[REWARD], discount = (float)gamma * row[DISCOUNT];
    int length = 1;
    for (; length < N_STEP && row[DONE] == 0.0f; ++length) {
        row = rows + (slot + length) % capacity * COLUMNS;
        reward += discount * row[REWARD];
        discount *= (float)gamma * row[DISCOUNT];
    }
    rewards[n] = reward;
    discounts[n] = discount;
    const i64 frame = places[slot * 2], age = places[slot * 2 + 1];
    stack(slots + (i64)n * STACK, frame, age, frame_capacity);
    stack(next_slots + (i64)n * STACK, frame + length, age + length, frame_capacity);
}
