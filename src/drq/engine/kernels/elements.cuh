// Pixels of float32 or bfloat16, channels last. A thread takes WIDTH neighbouring channels, a column, of a pixel.

#if BFLOAT16
typedef u16 Element;
__device__ __forceinline__ float as_float(Element value) { return from_bf16(value); }
__device__ __forceinline__ Element as_element(float value) { return (Element)pack_bf16(value, 0.0f); }
#else
typedef float Element;
__device__ __forceinline__ float as_float(Element value) { return value; }
__device__ __forceinline__ Element as_element(float value) { return value; }
#endif

constexpr int WIDTH = CHANNELS % 4 == 0 ? 4 : 1;
constexpr int COLUMNS = CHANNELS / WIDTH;

struct alignas(sizeof(Element) * WIDTH) Elements {
    Element v[WIDTH];
};
