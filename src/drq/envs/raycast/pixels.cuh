// What the samples of a pixel show.

struct Hit {
    int shape;  // -1: the sky
    float depth;
    Vec point;  // on the true surface, in the shape's own frame
    Facet facet;
};

struct List {  // shapes that a tile of pixels may show
    const u8* shapes;
    int count;
};

// Beyond a cylinder around the eye the sky covers everything.
DEVICE bool beyond_sky(const Scene& scene, float x, float y, float depth) {
    if (depth < scene.frame.before_sky || scene.assets.sky < 0) return false;
    const Eye& eye = scene.frame.eye[CAMERA];
    float limit = scene.frame.far * 0.7f;
    Vec way = (eye.corner + eye.across * x + eye.upward * y) * depth;
    return way.x * way.x + way.y * way.y > limit * limit || fabsf(way.z) > limit;
}

// The first opaque shape that a sample's ray meets beyond a depth, as one of the eyes sees it.
LARGE Hit cast(const Scene& scene, const List& list, int eye, float x, float y, float beyond, int except) {
    Hit hit;
    for (;;) {
        hit.shape = -1, hit.depth = scene.frame.far;
        for (int i = 0; i < list.count; ++i) {
            const Shape& s = scene.shapes[list.shapes[i]];
            const View& view = s.view[eye];
            float enters, leaves;
            if (list.shapes[i] == except ||
                !crosses(scene.assets, s, view.eye, ray_of(view, x, y), false, enters, leaves))
                continue;
            if (enters > beyond && enters < hit.depth) hit.depth = enters, hit.shape = list.shapes[i];
        }
        if (hit.shape < 0) return hit;
        if (eye == CAMERA && beyond_sky(scene, x, y, hit.depth)) {
            hit.shape = -1, hit.depth = scene.frame.far;
            return hit;
        }
        const Shape& s = scene.shapes[hit.shape];
        const View& view = s.view[eye];
        Vec d = ray_of(view, x, y);
        hit.point = view.eye + d * hit.depth;
        if (find_facet(scene.assets, s, view.eye, d, hit.point, hit.facet)) return hit;
        beyond = hit.depth;  // it passes that shape's triangles
    }
}

// Transparent shapes between two depths over a colour: from the nearest to the farthest, and back again.
LARGE Rgb veiled(const Scene& scene, int eye, float x, float y, int px, int py, float from, float to, int except,
                 Rgb colour) {
    const int count = scene.frame.transparent;
    for (int turn = 0; turn < 2 * count; ++turn) {
        int number = scene.frame.veil[turn < count ? turn : 2 * count - 1 - turn];
        const Shape& s = scene.shapes[number];
        if (s.type != PLANE && !touches(s.bound[eye], x, y, 0.0f)) continue;
        const View& view = s.view[eye];
        Vec d = ray_of(view, x, y);
        float enters, leaves;
        if (number == except || !crosses(scene.assets, s, view.eye, d, s.from_behind, enters, leaves)) continue;
        if (enters <= from || enters > to) continue;
        Facet f;
        Vec point = view.eye + d * enters;
        if (!find_facet(scene.assets, s, view.eye, d, point, f)) continue;
        Vec over = unrounded(shade(scene, s, f, eye, px, py, x, y));
        colour = rounded(over * s.alpha + unrounded(colour) * (1.0f - s.alpha));
    }
    return colour;
}

// What the mirror shows at a sample of it.
DEVICE bool in_mirror(const Scene& scene, const Hit& hit) {
    if (hit.shape < 0 || hit.shape != scene.frame.mirror) return false;
    const Shape& s = scene.shapes[hit.shape];
    return s.type == PLANE || hit.facet.row / (scene.assets.quads + 1) == 5;  // of a box its top
}

// Which shapes a tile of pixels may show to an eye. Its sides are those of the samples' rays.
LARGE bool in_tile(const Scene& scene, const Shape& s, int eye, float left, float bottom, float width, float height) {
    if (s.transparent) return false;
    if (s.type != PLANE) {
        float half_width = width * 0.5f, half_height = height * 0.5f;
        float reach = sqrtf(half_width * half_width + half_height * half_height) + 0.01f;
        return touches(s.bound[eye], left + half_width, bottom + half_height, reach);
    }
    const Grid& grid = scene.assets.grids[s.grid];
    const View& view = s.view[eye];
    float across = scene.assets.tables[grid.x + grid.columns - 1], up = scene.assets.tables[grid.y + grid.rows - 1];
    int away = 0, outside[4] = {0, 0, 0, 0};
    for (int k = 0; k < 4; ++k) {
        Vec d = ray_of(view, left + (k & 1 ? width : 0.0f), bottom + (k & 2 ? height : 0.0f));
        if (d.z >= 0.0f) {
            away += 1;
            continue;
        }
        float t = -view.eye.z / d.z, x = view.eye.x + t * d.x, y = view.eye.y + t * d.y, slack = 1.0001f;
        outside[0] += x > across * slack, outside[1] += x < -across * slack;
        outside[2] += y > up * slack, outside[3] += y < -up * slack;
    }
    return away < 4 && outside[0] < 4 && outside[1] < 4 && outside[2] < 4 && outside[3] < 4;
}
