// The colour of a triangle: light at its corners, shadows, textures.

DEVICE Vec shine(const Light& light, const Shape& s, Vec rgb, Vec point, Vec normal, Vec to_eye) {
    const LightWords& w = light.w;
    Vec towards = light.direction * -1.0f;
    float strength = 1.0f;
    if (!w.type) {
        Vec way = w.position - point;
        float distance = sqrtf(most(dot(way, way), 1e-30f));
        towards = way * (1.0f / distance);
        strength = 1.0f / (w.attenuation.x + w.attenuation.y * distance + w.attenuation.z * distance * distance);
        if (w.cutoff < 180.0f) {
            float cosine = -dot(towards, light.direction);
            if (cosine < w.cutoff_cosine) return {0.0f, 0.0f, 0.0f};
            if (w.exponent != 0.0f) strength = strength * power(cosine, w.exponent);
        }
    }
    Vec colour = w.ambient * rgb;
    float facing = dot(normal, towards);
    if (facing > 0.0f) {
        colour = colour + w.diffuse * rgb * facing;
        float between = dot(normal, normalized(towards + to_eye));
        if (between > 0.0f) colour = colour + w.specular * (power(between, s.shininess * 128.0f) * s.specular);
    }
    return colour * strength;
}

struct Scene {
    const Assets& assets;
    const Frame& frame;
    const Shape* shapes;
#ifdef CACHE
    Cache& cache;
#endif
};

// A corner's colour before textures: in the light that is drawn first, and in that of each light with a shadow. The
// mirror and transparent shapes know no shadows.
struct Lit {
    Vec plain, single[MAX_SHADOWS];
};

DEVICE Lit lit_corner(const Scene& scene, const Shape& s, Place at, int eye) {
    const Frame& frame = scene.frame;
    const bool shadows = eye == CAMERA && !s.transparent;
    Corner corner = corner_at(scene.assets, s, at.row, at.column);
    Vec point = to_world(s, corner.point) + s.position, normal = to_world(s, normalized(corner.normal));
    Vec to_eye = normalized(frame.eye[eye].position - point), rgb = s.rgb;
    if (eye == MIRRORED) rgb = rgb * scene.shapes[frame.mirror].reflectance;
    Lit lit = {rgb * (s.emission + (frame.lights ? 0.0f : 0.3f)), {}};
    for (int i = 0; i < frame.lights; ++i) {
        const Light& light = frame.light[i];
        Vec colour = shine(light, s, rgb, point, normal, to_eye);
        if (!shadows || light.shadow < 0) lit.plain = lit.plain + colour;
        else if (light.shadow == 0) lit.single[0] = clamped(colour);
        else lit.single[1] = clamped(colour);
    }
    lit.plain = clamped(lit.plain);
    return lit;
}

#ifdef CACHE
DEVICE const Lit& corner_light(const Scene& scene, const Shape& s, Place at, int eye);
DEVICE bool nothing_in_map(const Scene& scene, int map, float x, float y);
#else
DEVICE Lit corner_light(const Scene& scene, const Shape& s, Place at, int eye) { return lit_corner(scene, s, at, eye); }
DEVICE bool nothing_in_map(const Scene&, int, float, float) { return false; }  // unknown
#endif

struct Ray {
    Vec from, along;
};

// Whether a shape is in a light's map where the ray is, before a depth.
LARGE bool hides(const Scene& scene, const Light& light, const Shape& s, Ray ray, float depth, float bias,
                 float texel) {
    float enters, leaves;
    Vec o = to_local(s, ray.from - s.position), d = to_local(s, ray.along);
    if (!s.casts || !crosses(scene.assets, s, o, d, true, enters, leaves)) return false;
    for (int k = 0; k < (s.type == PLANE ? 1 : 2); ++k) {
        float t = k ? leaves : enters;
        if (t < scene.frame.near || t > scene.frame.far || t >= depth) continue;
        Vec normal = to_world(s, normal_at(s, o + d * t));
        float steep = most(fabsf(dot(normal, light.right)), fabsf(dot(normal, light.up)));
        float change = steep / most(fabsf(dot(normal, ray.along)), 1e-6f * steep) * texel * (light.w.type ? 1.0f : t);
        if (t + change + bias < depth) return true;
    }
    return false;
}

// Whether a light's shadow map has something before the point. The map's texel is found as OpenGL does, what is in it
// by a ray through its centre.
LARGE bool shadowed(const Scene& scene, const Light& light, Vec point, const Shape& receiver) {
    const Assets& assets = scene.assets;
    bool directional = light.w.type;
    Vec way = point - light.w.position;
    float depth = dot(way, light.direction), near = scene.frame.near, far = scene.frame.far;
    if (depth > far || (!directional && depth <= 0.0f)) return false;
    float half = light.half, width = directional ? half : half * depth, side = (float)assets.shadow_size;
    int column = (int)floorf((dot(way, light.right) / width * 0.5f + 0.5f) * side);
    int row = (int)floorf((dot(way, light.up) / width * 0.5f + 0.5f) * side);
    if (column < 1 || column > assets.shadow_size - 2 || row < 1 || row > assets.shadow_size - 2) return false;
    // Drawn into the texels from 1 to size - 1.
    float x = ((float)column - 0.5f) / (side - 2.0f) * 2.0f - 1.0f,
          y = ((float)row - 0.5f) / (side - 2.0f) * 2.0f - 1.0f;
    Vec aside = light.right * (x * half) + light.up * (y * half);
    Ray ray = {directional ? light.w.position + aside : light.w.position,
               directional ? light.direction : light.direction + aside};
    // Depths in the map are pushed back by 1.5 times how much they change from texel to texel, and by so much.
    float bias = 4.0f / 16777216.0f * (directional ? far - near : depth * depth * (far - near) / (near * far));
    float texel = 1.5f * 2.0f * half / (side - 2.0f);
    for (int i = 0; i < scene.frame.planes; ++i) {
        const Shape& s = scene.shapes[scene.frame.plane[i]];
        // A plane hides nothing that is on the light's side of it.
        float light_side = directional ? -dot(light.direction, s.z) : dot(light.w.position - s.position, s.z);
        if (&s == &receiver || light_side * dot(point - s.position, s.z) >= 0.0f) continue;
        if (hides(scene, light, s, ray, depth, bias, texel)) return true;
    }
    if (nothing_in_map(scene, light.shadow, x, y)) return false;
    for (int i = 0; i < scene.frame.shapes; ++i) {
        const Shape& s = scene.shapes[i];
        if (&s == &receiver || s.type == PLANE || !touches(s.shadow[light.shadow], x, y, 0.0f)) continue;
        if (hides(scene, light, s, ray, depth, bias, texel)) return true;
    }
    return false;
}

// What a triangle's pixels share.
struct Lighted {
    Triangle triangle;
    Lit corner[3];
};

LARGE Lighted lighted(const Scene& scene, const Shape& s, const Facet& f, int eye) {
    Lighted r;
    r.triangle = triangle_of(scene.assets, s, f);
#pragma unroll 1
    for (int k = 0; k < 3; ++k) r.corner[k] = corner_light(scene, s, corner_place(scene.assets, f, k), eye);
    return r;
}

// A triangle's colour where corners have these weights.
DEVICE Rgb coloured(const Scene& scene, const Shape& s, const Lighted& of, const float (&weight)[3], Vec texture,
                    Vec point, bool shadows) {
    Lit lit = {};
    for (int k = 0; k < 3; ++k) {
        lit.plain = lit.plain + of.corner[k].plain * weight[k];
        for (int i = 0; i < MAX_SHADOWS; ++i) lit.single[i] = lit.single[i] + of.corner[k].single[i] * weight[k];
    }
    Rgb colour = rounded(clamped(lit.plain) * texture);
    for (int i = 0; i < scene.frame.lights && shadows; ++i) {
        const Light& light = scene.frame.light[i];
        if (light.shadow < 0) continue;
        Rgb more = rounded(clamped(light.shadow ? lit.single[1] : lit.single[0]) * texture);
        if (more.r + more.g + more.b > 0 && !shadowed(scene, light, to_world(s, point) + s.position, s))
            colour = colour + more;
    }
    return colour;
}

// A triangle's colour in a pixel, which all of the pixel's samples that show it take: from the pixel's centre, even
// where the triangle does not cover that, or else from the first such sample (sx, sy), as the driver does.
LARGE Rgb shade(const Scene& scene, const Shape& s, const Facet& f, int eye, int x, int y, float sx, float sy) {
    const Assets& assets = scene.assets;
    const View& view = s.view[eye];
    Lighted of = lighted(scene, s, f, eye);
    Vec d = ray_of(view, (float)x + 0.5f, (float)y + 0.5f);
    float weight[3] = {0.0f, 0.0f, 0.0f}, depth = 0.0f;
    bool met = meets(of.triangle, view.eye, d, weight, depth) || (s.from_behind && depth > 0.0f);
    bool inside = weight[0] >= 0.0f && weight[1] >= 0.0f && weight[2] >= 0.0f;
    if (!met || (assets.nvidia && !inside)) {
        d = ray_of(view, sx, sy);
        meets(of.triangle, view.eye, d, weight, depth);
    }
    Vec p = view.eye + d * depth;
    Vec texture = s.texture < 0 ? Vec{1.0f, 1.0f, 1.0f} : textured(assets, s, view, of.triangle, p, x, y);
    return coloured(scene, s, of, weight, texture, p, eye == CAMERA && !s.transparent);
}
