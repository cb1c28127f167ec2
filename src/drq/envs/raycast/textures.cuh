// Textures in several sizes, and the sky, filtered as OpenGL does.

DEVICE Vec texel(const Assets& assets, int place) {
    u32 t = assets.texels[place];
    return {(float)(t & 255), (float)(t >> 8 & 255), (float)(t >> 16 & 255)};
}

// The texel next to the border, or across it. `i` is at most one outside.
DEVICE int wrapped(int i, int count, bool repeats) {
    return i < 0 ? (repeats ? count - 1 : 0) : i < count ? i : repeats ? 0 : count - 1;
}

// Between four texels of a level; of 255.
DEVICE Vec bilinear(const Assets& assets, const Texture& t, int level, int face, float u, float v) {
    int width = most(1, t.width >> level), height = most(1, t.height >> level);
    bool repeats = !t.cube;
    if (repeats) u = u - floorf(u), v = v - floorf(v);
    float x = u * (float)width - 0.5f, y = v * (float)height - 0.5f, left = floorf(x), below = floorf(y);
    float a = x - left, b = y - below;
    int x0 = wrapped((int)left, width, repeats), x1 = wrapped((int)left + 1, width, repeats);
    int y0 = wrapped((int)below, height, repeats), y1 = wrapped((int)below + 1, height, repeats);
    int first = t.offset[level] + face * width * height;
    Vec low = texel(assets, first + y0 * width + x0) * (1.0f - a) + texel(assets, first + y0 * width + x1) * a;
    Vec high = texel(assets, first + y1 * width + x0) * (1.0f - a) + texel(assets, first + y1 * width + x1) * a;
    return low * (1.0f - b) + high * b;
}

// `area` is the square of the texels that a pixel covers, the larger way.
LARGE Vec sampled(const Assets& assets, const Texture& t, int face, float u, float v, float area) {
    float level = area > 1.0f ? 0.5f * log_2(area) : 0.0f;
    int whole = least((int)level, t.levels - 1);
    Vec fine = bilinear(assets, t, whole, face, u, v);
    if (level > 0.0f && whole < t.levels - 1) {
        float rest = level - (float)whole;
        fine = fine * (1.0f - rest) + bilinear(assets, t, whole + 1, face, u, v) * rest;
    }
    return fine * (1.0f / 255.0f);
}

// Where a direction meets a face of the cube around it, from 0 to 1.
DEVICE int cube_face(Vec d) {
    float x = fabsf(d.x), y = fabsf(d.y), z = fabsf(d.z);
    return x >= y && x >= z ? (d.x > 0.0f ? 0 : 1) : y >= z ? (d.y > 0.0f ? 2 : 3) : (d.z > 0.0f ? 4 : 5);
}

struct Uv {
    float u, v;
};

DEVICE Uv on_face(Vec d, int face) {
    float across = face == 0 ? -d.z : face == 1 ? d.z : face == 5 ? -d.x : d.x;
    float down = face == 2 ? d.z : face == 3 ? -d.z : -d.y;
    float major = fabsf(face < 2 ? d.x : face < 4 ? d.y : d.z);
    return {(across / major + 1.0f) * 0.5f, (down / major + 1.0f) * 0.5f};
}

DEVICE float covered(Uv at, Uv right, Uv above, float width, float height) {
    float rx = (right.u - at.u) * width, ry = (right.v - at.v) * height;
    float ax = (above.u - at.u) * width, ay = (above.v - at.v) * height;
    return most(rx * rx + ry * ry, ax * ax + ay * ay);
}

LARGE Rgb sky_at(const Assets& assets, const Frame& frame, int x, int y) {
    if (assets.sky < 0) return {0, 0, 0};
    const Texture& t = assets.textures[assets.sky];
    const Eye& eye = frame.eye[CAMERA];
    const int xs[4] = {x, x & ~1, x | 1, x & ~1}, ys[4] = {y, y & ~1, y & ~1, y | 1};
    Uv uv[4];
    int face = 0;
    for (int k = 0; k < 4; ++k) {  // the pixel itself, and three of the four that OpenGL takes differences of
        Vec d = eye.corner + eye.across * ((float)xs[k] + 0.5f) + eye.upward * ((float)ys[k] + 0.5f),
            turned = {d.x, d.z, -d.y};
        if (k == 0) face = cube_face(turned);
        uv[k] = on_face(turned, face);
    }
    float side = (float)t.width;
    return rounded(sampled(assets, t, face, uv[0].u, uv[0].v, covered(uv[1], uv[2], uv[3], side, side)));
}

DEVICE Uv on_plane(const Shape& s, Vec p) { return {s.texture_scale.x * p.x - 0.5f, s.texture_scale.y * p.y - 0.5f}; }

DEVICE Vec ray_of(const View& view, float x, float y) { return view.corner + view.across * x + view.upward * y; }

// The places of a triangle's plane that are seen in three of the four pixels of which OpenGL takes differences.
struct Quad {
    Vec at, right, above;
};

DEVICE Quad quad_of(const View& view, const Triangle& t, int x, int y) {
    Vec n = cross(t.point[1] - t.point[0], t.point[2] - t.point[0]);
    float away = dot(t.point[0] - view.eye, n), left = (float)(x & ~1) + 0.5f, low = (float)(y & ~1) + 0.5f;
    Vec at = ray_of(view, left, low), right = ray_of(view, left + 1.0f, low), above = ray_of(view, left, low + 1.0f);
    return {view.eye + at * (away / dot(at, n)), view.eye + right * (away / dot(right, n)),
            view.eye + above * (away / dot(above, n))};
}

// The texture at a point p of a triangle's plane, on the face of a cube or flat.
DEVICE float covered(const Shape& s, const Texture& t, const Quad& q, int face) {
    Vec scale = s.texture_scale;
    float width = (float)t.width, height = (float)t.height;
    if (!t.cube) return covered(on_plane(s, q.at), on_plane(s, q.right), on_plane(s, q.above), width, height);
    return covered(on_face(q.at * scale, face), on_face(q.right * scale, face), on_face(q.above * scale, face), width,
                   height);
}

DEVICE Vec textured(const Assets& assets, const Shape& s, const View& view, const Triangle& triangle, Vec p, int x,
                    int y) {
    const Texture& t = assets.textures[s.texture];
    int face = t.cube ? cube_face(p * s.texture_scale) : 0;
    Uv uv = t.cube ? on_face(p * s.texture_scale, face) : on_plane(s, p);
    return sampled(assets, t, face, uv.u, uv.v, covered(s, t, quad_of(view, triangle, x, y), face));
}
