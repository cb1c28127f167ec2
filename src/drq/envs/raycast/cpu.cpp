// The ray caster on a CPU core. It shares what a GPU's threads each work out for themselves: a triangle's colour in a
// pixel among its samples, a corner's light among the pixels around it, the sky among frames that look the same way.
// None of it changes a pixel.

// What the shared texts take for granted.
#include <cmath>
#include <cstring>
#include <vector>

#define DEVICE static inline
#define LARGE static
#define CACHE

typedef unsigned char u8;
typedef unsigned int u32;

struct Cache;

static inline int bits_of(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

#include "raycast"  // the texts that a GPU compiles too

struct Cache {
    struct Corner {
        unsigned frame;
        Lit lit;
    };
    unsigned frame = 0;
    std::vector<int> first;  // corner of a shape
    std::vector<Corner> corners;

    // Which parts of the shadow maps have anything but planes in them.
    static constexpr int SIDE = 64;
    u8 taken[MAX_SHADOWS][SIDE][SIDE];

    int serial = -1;  // of the assets
    Vec looks[3];
    std::vector<Rgb> sky;  // red is negative where it is not known yet

    void begin(const Assets& of, const Frame& now, const Shape* shapes) {
        int count = 0;
        first.clear();
        for (int i = 0; i < now.shapes; ++i) {
            first.push_back(count);
            count += 2 * corners_of(of, shapes[i]);
        }
        if (corners.size() < (size_t)count) corners.resize(count);
        if (++frame == 0) {  // all numbers have been used: old corners must not look new
            corners.assign(corners.size(), Corner{});
            frame = 1;
        }
        memset(taken, 0, sizeof taken);
        for (int i = 0; i < now.lights; ++i)
            for (int k = 0; k < now.shapes && now.light[i].shadow >= 0; ++k)
                if (shapes[k].casts && shapes[k].type != PLANE)
                    take(shapes[k].shadow[now.light[i].shadow], taken[now.light[i].shadow]);
        const Eye& eye = now.eye[CAMERA];
        const Vec looking[3] = {eye.corner, eye.across, eye.upward};
        if (serial != of.serial || memcmp(looks, looking, sizeof looks)) {
            serial = of.serial;
            memcpy(looks, looking, sizeof looks);
            sky.assign(of.size * of.size, Rgb{-1, -1, -1});
        }
    }

    static int cell(float place) { return (int)most(0.0f, least((float)(SIDE - 1), (place + 1.0f) * (SIDE / 2))); }

    static void take(const Bound& b, u8 (&map)[SIDE][SIDE]) {
        if (b.radius < 0.0f) return;
        int top = cell(most(b.y1, b.y2) + b.radius), right = cell(most(b.x1, b.x2) + b.radius);
        for (int y = cell(least(b.y1, b.y2) - b.radius); y <= top; ++y)
            for (int x = cell(least(b.x1, b.x2) - b.radius); x <= right; ++x) map[y][x] = 1;
    }
};

static const Lit& corner_light(const Scene& scene, const Shape& s, Place at, int eye) {
    Cache& cache = scene.cache;
    int number = cache.first[&s - scene.shapes] + 2 * (at.row * columns_of(scene.assets, s) + at.column) + eye;
    Cache::Corner& corner = cache.corners[number];
    if (corner.frame != cache.frame) corner = {cache.frame, lit_corner(scene, s, at, eye)};
    return corner.lit;
}

static bool nothing_in_map(const Scene& scene, int map, float x, float y) {
    return !scene.cache.taken[map][Cache::cell(y)][Cache::cell(x)];
}

static Rgb kept_sky(const Scene& scene, int x, int y) {
    Rgb& kept = scene.cache.sky[y * scene.assets.size + x];
    if (kept.r < 0) kept = sky_at(scene.assets, scene.frame, x, y);
    return kept;
}

// Colours of a pixel's triangles, so that each is worked out once, for the first sample that shows it.
struct Shared {
    int count = 0, shape[4];
    Facet facet[4];
    Rgb colour[4];

    Rgb of(const Scene& scene, const Hit& hit, int eye, int x, int y, float sx, float sy) {
        for (int k = 0; k < count; ++k)
            if (shape[k] == hit.shape && same(facet[k], hit.facet)) return colour[k];
        shape[count] = hit.shape, facet[count] = hit.facet;
        return colour[count++] = shade(scene, scene.shapes[hit.shape], hit.facet, eye, x, y, sx, sy);
    }
};

static Rgb draw_pixel(const Scene& scene, const List (&lists)[2], int x, int y) {
    const Frame& frame = scene.frame;
    Rgb sum = {0, 0, 0};
    Shared direct, mirrored;
    for (int k = 0; k < 4; ++k) {
        float sx = (float)x + scene.assets.samples[2 * k], sy = (float)y + scene.assets.samples[2 * k + 1];
        Rgb colour;
        Hit hit = cast(scene, lists[CAMERA], CAMERA, sx, sy, frame.near, -1);
        if (hit.shape < 0) {
            colour = kept_sky(scene, x, y);
        } else {
            colour = direct.of(scene, hit, CAMERA, x, y, sx, sy);
            if (in_mirror(scene, hit)) {
                Hit image = cast(scene, lists[MIRRORED], MIRRORED, sx, sy, hit.depth, hit.shape);
                Rgb seen = {0, 0, 0};
                if (image.shape >= 0) seen = mirrored.of(scene, image, MIRRORED, x, y, sx, sy);
                if (frame.transparent)
                    seen = veiled(scene, MIRRORED, sx, sy, x, y, hit.depth, image.depth, hit.shape, seen);
                colour = colour + seen;
            }
            colour = saturated(colour);
        }
        if (frame.transparent) colour = veiled(scene, CAMERA, sx, sy, x, y, frame.near, hit.depth, -1, colour);
        sum = sum + colour;
    }
    return {(sum.r + 2) >> 2, (sum.g + 2) >> 2, (sum.b + 2) >> 2};
}

constexpr int TILE = 4;  // even, so that OpenGL's differences are taken inside

// Draws a tile that shows nothing but one triangle of a plane, if it does.
static bool draw_plane(const Scene& scene, const List (&lists)[2], int left, int bottom, Rgb (&colours)[TILE][TILE]) {
    const Assets& assets = scene.assets;
    const Shape& s = scene.shapes[lists[CAMERA].shapes[0]];
    if (s.type != PLANE || lists[CAMERA].count > 1 || lists[MIRRORED].count || scene.frame.transparent) return false;
    if (s.texture >= 0 && assets.textures[s.texture].cube) return false;
    const View& view = s.view[CAMERA];
    Facet facet[4];
    for (int k = 0; k < 4; ++k) {
        Vec d = ray_of(view, (float)(left + (k & 1) * TILE), (float)(bottom + (k >> 1) * TILE));
        float depth, same_depth;
        if (!crosses(assets, s, view.eye, d, false, depth, same_depth)) return false;
        if (depth <= scene.frame.near || depth >= scene.frame.before_sky) return false;
        facet[k] = facet_under(assets, s, view.eye + d * depth);
        if (k && !same(facet[k], facet[0])) return false;
    }
    Lighted of = lighted(scene, s, facet[0], CAMERA);
    for (int y = 0; y < TILE; y += 2)
        for (int x = 0; x < TILE; x += 2) {
            float area = s.texture < 0 ? 0.0f
                                       : covered(s, assets.textures[s.texture],
                                                 quad_of(view, of.triangle, left + x, bottom + y), 0);
            for (int k = 0; k < 4; ++k) {
                Vec d = ray_of(view, (float)(left + x + (k & 1)) + 0.5f, (float)(bottom + y + (k >> 1)) + 0.5f),
                    texture = {1.0f, 1.0f, 1.0f};
                float weight[3], depth;
                meets(of.triangle, view.eye, d, weight, depth);
                Vec p = view.eye + d * depth;
                if (s.texture >= 0) {
                    Uv uv = on_plane(s, p);
                    texture = sampled(assets, assets.textures[s.texture], 0, uv.u, uv.v, area);
                }
                colours[y + (k >> 1)][x + (k & 1)] = saturated(coloured(scene, s, of, weight, texture, p, true));
            }
        }
    return true;
}

// One frame as (3, size, size), its rows from above.
static void draw_frame(const Assets& assets, const FrameWords& words, const GeomWords* geoms, u8* out) {
    static thread_local Cache cache;
    static thread_local std::vector<Shape> shapes;
    Frame frame;
    shapes.resize(words.geoms);
    prepare_frame(assets, words, geoms, frame);
    for (int i = 0; i < frame.shapes; ++i) prepare_shape(assets, frame, geoms[i], shapes[i]);
    cache.begin(assets, frame, shapes.data());
    const Scene scene = {assets, frame, shapes.data(), cache};
    const int size = assets.size, plane = size * size;
    u8 seen[2][MAX_SHAPES];
    for (int bottom = 0; bottom < size; bottom += TILE)
        for (int left = 0; left < size; left += TILE) {
            List lists[2] = {{seen[0], 0}, {seen[1], 0}};
            for (int eye = 0; eye < (frame.mirror < 0 ? 1 : 2); ++eye)
                for (int i = 0; i < frame.shapes; ++i)
                    if (in_tile(scene, shapes[i], eye, (float)left, (float)bottom, TILE, TILE))
                        seen[eye][lists[eye].count++] = (u8)i;
            bool only_sky = !lists[CAMERA].count && !frame.transparent;
            Rgb colours[TILE][TILE];
            bool drawn = lists[CAMERA].count && draw_plane(scene, lists, left, bottom, colours);
            for (int y = bottom; y < least(bottom + TILE, size); ++y)
                for (int x = left; x < least(left + TILE, size); ++x) {
                    Rgb colour = only_sky ? kept_sky(scene, x, y)
                                 : drawn  ? colours[y - bottom][x - left]
                                          : draw_pixel(scene, lists, x, y);
                    u8* pixel = out + (size - 1 - y) * size + x;
                    pixel[0] = (u8)colour.r, pixel[plane] = (u8)colour.g, pixel[2 * plane] = (u8)colour.b;
                }
        }
}

extern "C" void draw(const Assets* assets, const FrameWords* words, const GeomWords* geoms, int frames, int capacity,
                     u8* out) {
    for (int n = 0; n < frames; ++n)
        draw_frame(*assets, words[n], geoms + (size_t)n * capacity, out + (size_t)n * 3 * assets->size * assets->size);
}

extern "C" void sizes(int* of) { of[0] = sizeof(Assets), of[1] = sizeof(FrameWords), of[2] = sizeof(GeomWords); }
