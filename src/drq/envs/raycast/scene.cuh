// The scene as it is handed in, and made ready.
//
// Pixels are counted from the lower left. A ray through (x, y) in pixels is eye + t (corner + x across + y upward),
// where t is the depth: the distance along the viewing direction.

enum { PLANE = 0, SPHERE = 2, CAPSULE = 3, ELLIPSOID = 4, CYLINDER = 5, BOX = 6 };  // MuJoCo's numbers
enum { DECORATION = 4 };                                                            // its category that casts no shadow
constexpr int MAX_SHAPES = 200, MAX_LIGHTS = 8, MAX_SHADOWS = 2, MAX_PLANES = 16, MAX_LEVELS = 14;

struct GeomWords {  // fields of an mjvGeom
    int type, grid, category, material;
    Vec size, position;
    float rotation[9], rgba[4], emission, specular, shininess, reflectance;
};

struct LightWords {  // fields of an mjvLight, and what needs an angle's functions
    int type;
    Vec position, direction, attenuation;
    float cutoff, exponent;
    Vec ambient, diffuse, specular;
    int shadow;
    float cutoff_cosine, map_tangent;
};

struct CameraWords {  // fields of an mjvGLCamera
    Vec position, forward, up;
    float center, bottom, top, near, far;
};

struct FrameWords {
    int geoms, lights;
    CameraWords cameras[2];
    LightWords light[MAX_LIGHTS];
};

struct Material {
    int texture, uniform;
    float repeat[2];
};

struct Texture {  // its levels, each with one face or six, lie one behind the other
    int cube, levels, width, height, offset[MAX_LEVELS];
};

struct Grid {  // where a plane's lines are, as places in the tables, and how many a metre has of the inner ones
    int columns, rows, x, y;
    float across, up;
};

struct Assets {
    const u32* texels;  // red in the lowest byte
    const Texture* textures;
    const Material* materials;
    const Grid* grids;
    const float* tables;  // cosines and sines of the slices' corners, then of the stacks', then the grids
    int size, shadow_size, slices, stacks, quads, sky;
    int nvidia;  // cuts cells along the other diagonal, and takes no colour from outside a triangle
    int serial;  // no two of a process have the same
    float shadow_clip, samples[8];
};

struct Eye {
    Vec position, corner, across, upward, right, up, forward;
    float left, bottom, step;  // the image's lower left corner and a pixel, at depth 1
};

struct Light {
    LightWords w;
    Vec direction, right, up;  // of length 1: the axes of its shadow map
    float half;                // half its width, at depth 1 unless the light is directional
    int shadow;                // which of the lights with a shadow it is, or -1
};

// A capsule around a shape as it is seen, in pixels. Out of sight where the radius is negative.
struct Bound {
    float x1, y1, x2, y2, radius;
};

struct View {  // an eye in a shape's own frame
    Vec eye, corner, across, upward;
};

enum { CAMERA = 0, MIRRORED = 1 };

struct Shape {
    int type, grid, texture, casts, transparent, from_behind;
    Vec size, position, x, y, z, rgb, texture_scale;
    float alpha, emission, specular, shininess, reflectance;
    View view[2];
    Bound bound[2], shadow[MAX_SHADOWS];
};

struct Frame {
    int shapes, lights, mirror, transparent, planes;
    u8 plane[MAX_PLANES], veil[MAX_SHAPES];
    float near, far, before_sky;  // no ray reaches the sky at less than that depth
    Eye eye[2];
    Light light[MAX_LIGHTS];
};

DEVICE Vec to_local(const Shape& s, Vec v) { return {dot(s.x, v), dot(s.y, v), dot(s.z, v)}; }
DEVICE Vec to_world(const Shape& s, Vec v) { return s.x * v.x + s.y * v.y + s.z * v.z; }
DEVICE Vec mirrored(Vec v, Vec normal) { return v - normal * (2.0f * dot(v, normal)); }

DEVICE void prepare_eye(const CameraWords (&cameras)[2], int size, Frame& frame) {
    const CameraWords &a = cameras[0], &b = cameras[1];
    Eye& eye = frame.eye[CAMERA];
    eye.position = (a.position + b.position) * 0.5f;
    eye.forward = normalized(a.forward + b.forward);
    eye.right = normalized(cross(eye.forward, a.up + b.up));
    eye.up = cross(eye.right, eye.forward);
    frame.near = (a.near + b.near) * 0.5f;
    frame.far = (a.far + b.far) * 0.5f;
    float bottom = (a.bottom + b.bottom) * 0.5f / frame.near, top = (a.top + b.top) * 0.5f / frame.near;
    float center = (a.center + b.center) * 0.5f / frame.near;
    eye.left = center - (top - bottom) * 0.5f;
    eye.bottom = bottom;
    eye.step = (top - bottom) / (float)size;
    eye.corner = eye.forward + eye.right * eye.left + eye.up * eye.bottom;
    eye.across = eye.right * eye.step;
    eye.upward = eye.up * eye.step;
    float aside = most(fabsf(eye.left), fabsf(eye.left + top - bottom)), upright = most(fabsf(bottom), fabsf(top));
    frame.before_sky = frame.far * 0.69f / sqrtf(1.0f + aside * aside + upright * upright);
}

DEVICE void prepare_lights(const FrameWords& words, float shadow_clip, Frame& frame) {
    int shadows = 0;
    for (int i = 0; i < frame.lights; ++i) {
        const LightWords& w = words.light[i];
        Light& light = frame.light[i];
        light.w = w;
        light.direction = normalized(w.direction);
        Vec up = cross(light.direction, Vec{-1.0f, 0.0f, 0.0f});
        if (dot(up, up) <= 0.01f) up = cross(light.direction, Vec{0.0f, 1.0f, 0.0f});
        light.right = normalized(cross(light.direction, up));
        light.up = cross(light.right, light.direction);
        light.half = w.type ? shadow_clip : w.map_tangent;
        light.shadow = w.shadow && shadows < MAX_SHADOWS ? shadows++ : -1;
    }
}

DEVICE Vec axis(const GeomWords& g, int k) { return {g.rotation[k], g.rotation[k + 3], g.rotation[k + 6]}; }

DEVICE bool seen_from_behind(const GeomWords& g, Vec eye) {
    return g.type == PLANE && dot(eye - g.position, axis(g, 2)) < 0.0f;
}

DEVICE bool is_transparent(const GeomWords& g, Vec eye) { return g.rgba[3] < 0.995f || seen_from_behind(g, eye); }

DEVICE float distance_to(const GeomWords& g, Vec eye) {
    Vec size = g.size, away = g.position - eye;
    float radius = g.type == SPHERE      ? size.x
                   : g.type == CAPSULE   ? size.x + size.z
                   : g.type == CYLINDER  ? sqrtf(size.x * size.x + size.z * size.z)
                   : g.type == ELLIPSOID ? most(size.x, most(size.y, size.z))
                                         : sqrtf(dot(size, size));
    return g.type == PLANE ? 1e10f : sqrtf(dot(away, away)) - radius;
}

// Which shape mirrors (the first that can), and its mirror image of the eye.
DEVICE void prepare_mirror(const GeomWords* geoms, Frame& frame) {
    Eye &eye = frame.eye[CAMERA], &image = frame.eye[MIRRORED];
    image = eye;
    frame.mirror = -1;
    for (int i = frame.shapes - 1; i >= 0; --i) {
        const GeomWords& g = geoms[i];
        if ((g.type == PLANE || g.type == BOX) && g.reflectance > 0.0f && !is_transparent(g, eye.position))
            frame.mirror = i;
    }
    if (frame.mirror < 0) return;
    const GeomWords& g = geoms[frame.mirror];
    Vec normal = axis(g, 2), on_mirror = g.position + normal * (g.type == BOX ? g.size.z : 0.0f);
    if (dot(eye.position - on_mirror, normal) < 0.0f) {
        frame.mirror = -1;
        return;
    }
    image.position = on_mirror + mirrored(eye.position - on_mirror, normal);
    image.corner = mirrored(eye.corner, normal), image.across = mirrored(eye.across, normal);
    image.upward = mirrored(eye.upward, normal), image.right = mirrored(eye.right, normal);
    image.up = mirrored(eye.up, normal), image.forward = mirrored(eye.forward, normal);
}

// Transparent shapes from the nearest to the farthest, and planes.
DEVICE void prepare_lists(const GeomWords* geoms, Frame& frame) {
    Vec eye = frame.eye[CAMERA].position;
    frame.transparent = frame.planes = 0;
    for (int i = 0; i < frame.shapes; ++i) {
        if (geoms[i].type == PLANE && frame.planes < MAX_PLANES) frame.plane[frame.planes++] = (u8)i;
        if (!is_transparent(geoms[i], eye)) continue;
        float distance = distance_to(geoms[i], eye);
        int place = frame.transparent++;
        for (; place > 0 && distance_to(geoms[frame.veil[place - 1]], eye) > distance; --place)
            frame.veil[place] = frame.veil[place - 1];
        frame.veil[place] = (u8)i;
    }
}

DEVICE void prepare_frame(const Assets& assets, const FrameWords& words, const GeomWords* geoms, Frame& frame) {
    frame.shapes = words.geoms, frame.lights = words.lights;
    prepare_eye(words.cameras, assets.size, frame);
    prepare_lights(words, assets.shadow_clip, frame);
    prepare_mirror(geoms, frame);
    prepare_lists(geoms, frame);
}

// The ends of a segment and a radius around it, seen along z; `scale` is what becomes 1 at depth 1.
DEVICE Bound bound_of(Vec a, Vec b, float radius, bool perspective, float scale, float left, float bottom) {
    if (!perspective) {
        float r = radius / scale;
        return {(a.x - left) / scale, (a.y - bottom) / scale, (b.x - left) / scale, (b.y - bottom) / scale, r};
    }
    if (most(a.z, b.z) + radius <= 0.0f) return {0.0f, 0.0f, 0.0f, 0.0f, -1.0f};
    if (least(a.z, b.z) - radius <= 1e-3f * radius) return {0.0f, 0.0f, 0.0f, 0.0f, 1e15f};
    float u1 = a.x / a.z, v1 = a.y / a.z, u2 = b.x / b.z, v2 = b.y / b.z;
    float r1 = sqrtf(1.0f + u1 * u1 + v1 * v1) / (a.z - radius), r2 = sqrtf(1.0f + u2 * u2 + v2 * v2) / (b.z - radius);
    float r = most(r1, r2) * radius / scale;
    return {(u1 - left) / scale, (v1 - bottom) / scale, (u2 - left) / scale, (v2 - bottom) / scale, r};
}

DEVICE void prepare_shape(const Assets& assets, const Frame& frame, const GeomWords& g, Shape& s) {
    s.type = g.type, s.grid = g.grid, s.casts = g.category != DECORATION;
    s.size = g.size, s.position = g.position;
    s.x = axis(g, 0), s.y = axis(g, 1), s.z = axis(g, 2);
    s.rgb = {g.rgba[0], g.rgba[1], g.rgba[2]};
    s.emission = g.emission, s.specular = g.specular, s.shininess = g.shininess, s.reflectance = g.reflectance;
    s.texture = g.material < 0 ? -1 : assets.materials[g.material].texture;
    if (s.texture >= 0) {
        const Material& material = assets.materials[g.material];
        Vec one = {1.0f, 1.0f, 1.0f}, shrunk = {1.0f / s.size.x, 1.0f / s.size.y, 1.0f / s.size.z};
        s.texture_scale = material.uniform ? one : shrunk;
        if (assets.textures[s.texture].cube) s.texture_scale = s.type == PLANE ? one : s.texture_scale;
        else s.texture_scale = Vec{0.5f * material.repeat[0], -0.5f * material.repeat[1], 0.0f} * s.texture_scale;
    }
    s.from_behind = seen_from_behind(g, frame.eye[CAMERA].position);
    s.transparent = is_transparent(g, frame.eye[CAMERA].position);
    s.alpha = g.rgba[3] * (s.from_behind ? 0.3f : 1.0f);
    // How it looks from the eyes and the lights.
    float half = 0.0f, radius = s.size.x;
    if (s.type == CAPSULE || s.type == CYLINDER) half = s.size.z;
    else if (s.type == ELLIPSOID) radius = most(s.size.x, most(s.size.y, s.size.z));
    else if (s.type == BOX) radius = sqrtf(dot(s.size, s.size));
    radius = radius * 1.001f;  // so that rounding cannot hide what touches its bound
    for (int v = 0; v < (frame.mirror < 0 ? 1 : 2); ++v) {
        const Eye& eye = frame.eye[v];
        Vec away = s.position - eye.position;
        s.view[v] = {to_local(s, eye.position - s.position), to_local(s, eye.corner), to_local(s, eye.across),
                     to_local(s, eye.upward)};
        Vec a = away + s.z * half, b = away - s.z * half;
        s.bound[v] = bound_of(Vec{dot(a, eye.right), dot(a, eye.up), dot(a, eye.forward)},
                              Vec{dot(b, eye.right), dot(b, eye.up), dot(b, eye.forward)}, radius, true, eye.step,
                              eye.left, eye.bottom);
    }
    for (int i = 0; i < frame.lights; ++i) {
        const Light& light = frame.light[i];
        if (light.shadow < 0) continue;
        Vec away = s.position - light.w.position, a = away + s.z * half, b = away - s.z * half;
        s.shadow[light.shadow] = bound_of(Vec{dot(a, light.right), dot(a, light.up), dot(a, light.direction)},
                                          Vec{dot(b, light.right), dot(b, light.up), dot(b, light.direction)}, radius,
                                          !light.w.type, light.half, 0.0f, 0.0f);
    }
}

DEVICE bool touches(const Bound& bound, float x, float y, float reach) {
    float along_x = bound.x2 - bound.x1, along_y = bound.y2 - bound.y1, to_x = x - bound.x1, to_y = y - bound.y1;
    float limit = bound.radius + reach;
    if (to_x < least(along_x, 0.0f) - limit || to_x > most(along_x, 0.0f) + limit) return false;
    if (to_y < least(along_y, 0.0f) - limit || to_y > most(along_y, 0.0f) + limit) return false;
    float length = along_x * along_x + along_y * along_y;
    float t = length > 0.0f ? clamped((to_x * along_x + to_y * along_y) / length) : 0.0f;
    float off_x = to_x - along_x * t, off_y = to_y - along_y * t;
    return bound.radius >= 0.0f && off_x * off_x + off_y * off_y <= limit * limit;
}
