// Draws MuJoCo's abstract scene by casting rays, as its OpenGL renderer would: the same triangles, lit at their
// corners. Here: numbers and vectors; then scene, intersections, triangles, textures, shading, pixels.
//
// One text for CUDA and for C++. It uses additions, multiplications, divisions and square roots, which IEEE 754 settles
// to the last bit, and its own elementary functions made of them: where no compiler fuses a product with a sum, every
// machine draws the same pixels. What comes before it defines DEVICE (and LARGE, for what is too large to be copied to
// wherever it is called), u8, u32, bits_of and float_of.

struct Vec {
    float x, y, z;
};

DEVICE Vec operator+(Vec a, Vec b) { return {a.x + b.x, a.y + b.y, a.z + b.z}; }
DEVICE Vec operator-(Vec a, Vec b) { return {a.x - b.x, a.y - b.y, a.z - b.z}; }
DEVICE Vec operator*(Vec a, float s) { return {a.x * s, a.y * s, a.z * s}; }
DEVICE Vec operator*(Vec a, Vec b) { return {a.x * b.x, a.y * b.y, a.z * b.z}; }
DEVICE float dot(Vec a, Vec b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
DEVICE Vec cross(Vec a, Vec b) { return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x}; }
DEVICE float least(float a, float b) { return a < b ? a : b; }
DEVICE float most(float a, float b) { return a > b ? a : b; }
DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }
DEVICE float clamped(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }
DEVICE Vec clamped(Vec a) { return {clamped(a.x), clamped(a.y), clamped(a.z)}; }
DEVICE Vec normalized(Vec a) { return a * (1.0f / sqrtf(most(dot(a, a), 1e-30f))); }

// A colour as a frame buffer keeps it, before it saturates: 255 is full.
struct Rgb {
    int r, g, b;
};

DEVICE Rgb operator+(Rgb a, Rgb b) { return {a.r + b.r, a.g + b.g, a.b + b.b}; }
DEVICE Rgb saturated(Rgb a) { return {least(a.r, 255), least(a.g, 255), least(a.b, 255)}; }
DEVICE Rgb rounded(Vec a) {
    return {(int)(a.x * 255.0f + 0.5f), (int)(a.y * 255.0f + 0.5f), (int)(a.z * 255.0f + 0.5f)};
}
DEVICE Vec unrounded(Rgb a) { return Vec{(float)a.r, (float)a.g, (float)a.b} * (1.0f / 255.0f); }

// log2 of a positive number: its exponent, and the series of the area tangent of what is left.
DEVICE float log_2(float x) {
    int bits = bits_of(x), exponent = (bits >> 23) - 127;
    float rest = float_of((bits & 0x007FFFFF) | 0x3F800000);
    if (rest > 1.41421356f) rest = rest * 0.5f, exponent += 1;
    float s = (rest - 1.0f) / (rest + 1.0f), q = s * s;
    float series = 1.0f + q * (0.33333333f + q * (0.2f + q * (0.14285714f + q * 0.11111111f)));
    return (float)exponent + 2.88539008f * s * series;
}

// 2 to the power of a number below 128.
DEVICE float exp_2(float x) {
    float whole = floorf(x + 0.5f), z = (x - whole) * 0.69314718f;
    if (whole < -126.0f) return 0.0f;
    float series =
        1.0f +
        z * (1.0f + z * (0.5f + z * (0.16666667f + z * (0.041666667f + z * (0.0083333333f + z * 0.0013888889f)))));
    return float_of(bits_of(series) + ((int)whole << 23));
}

DEVICE float power(float x, float exponent) { return x > 0.0f ? exp_2(exponent * log_2(x)) : 0.0f; }

// The angle of (x, y) from the x axis, in turns from 0 to 1; good to 1e-6.
DEVICE float turns(float x, float y) {
    float a = fabsf(x), b = fabsf(y), large = most(a, b), t = large > 0.0f ? least(a, b) / large : 0.0f, q = t * t;
    float angle =
        t *
        (0.15915494f +
         q * (-0.05305083f +
              q * (0.03172896f +
                   q * (-0.02169062f + q * (0.01408436f + q * (-0.00710632f + q * (0.00237043f - q * 0.00037343f)))))));
    if (b > a) angle = 0.25f - angle;
    if (x < 0.0f) angle = 0.5f - angle;
    return y < 0.0f ? 1.0f - angle : angle;
}
