// Rays and the true surfaces of shapes.

DEVICE bool crosses_sphere(Vec o, Vec d, float radius, float& enters, float& leaves) {
    float square = dot(d, d), middle = -dot(o, d) / square;
    Vec nearest = o + d * middle;
    float rest = radius * radius - dot(nearest, nearest), half = sqrtf(most(rest, 0.0f) / square);
    enters = middle - half, leaves = middle + half;
    return rest >= 0.0f;
}

// Where a ray enters and leaves a shape, in its own frame. The same twice for a plane, which is hit from above, or from
// both sides.
DEVICE bool crosses(const Assets& assets, const Shape& s, Vec o, Vec d, bool both_sides, float& enters, float& leaves) {
    Vec size = s.size;
    switch (s.type) {
    case PLANE: {
        if ((!both_sides && d.z >= 0.0f) || d.z == 0.0f) return false;
        float t = -o.z / d.z;
        const Grid& grid = assets.grids[s.grid];
        enters = leaves = t;
        return t > 0.0f && fabsf(o.x + t * d.x) <= assets.tables[grid.x + grid.columns - 1] &&
               fabsf(o.y + t * d.y) <= assets.tables[grid.y + grid.rows - 1];
    }
    case SPHERE:
    case ELLIPSOID: {
        Vec a = {o.x / size.x, o.y / size.y, o.z / size.z}, b = {d.x / size.x, d.y / size.y, d.z / size.z};
        return crosses_sphere(a, b, 1.0f, enters, leaves);
    }
    case CAPSULE:
    case CYLINDER: {
        float square = most(d.x * d.x + d.y * d.y, 1e-20f), middle = -(o.x * d.x + o.y * d.y) / square;
        float x = o.x + middle * d.x, y = o.y + middle * d.y, rest = size.x * size.x - (x * x + y * y);
        if (rest < 0.0f) return false;
        float half = sqrtf(rest / square);
        enters = middle - half, leaves = middle + half;
        float low = o.z + enters * d.z, high = o.z + leaves * d.z;
        if (s.type == CYLINDER) {
            if (fabsf(d.z) < 1e-20f) return fabsf(o.z) <= size.z;
            float bottom = (-size.z - o.z) / d.z, top = (size.z - o.z) / d.z;
            enters = most(enters, least(bottom, top)), leaves = least(leaves, most(bottom, top));
            return enters < leaves;
        }
        // At an end beyond the cylinder, into or out of the half sphere there, if at all.
        float sphere_enters, sphere_leaves;
        if (fabsf(low) > size.z) {
            if (!crosses_sphere(Vec{o.x, o.y, o.z - (low > 0.0f ? size.z : -size.z)}, d, size.x, enters, sphere_leaves))
                return false;
        }
        if (fabsf(high) > size.z) {
            if (!crosses_sphere(Vec{o.x, o.y, o.z - (high > 0.0f ? size.z : -size.z)}, d, size.x, sphere_enters,
                                leaves))
                return false;
        }
        return true;
    }
    default: {
        enters = -1e30f, leaves = 1e30f;
        float os[3] = {o.x, o.y, o.z}, ds[3] = {d.x, d.y, d.z}, sizes[3] = {size.x, size.y, size.z};
        for (int k = 0; k < 3; ++k) {
            if (fabsf(ds[k]) < 1e-20f) {
                if (fabsf(os[k]) > sizes[k]) return false;
                continue;
            }
            float a = (-sizes[k] - os[k]) / ds[k], b = (sizes[k] - os[k]) / ds[k];
            enters = most(enters, least(a, b)), leaves = least(leaves, most(a, b));
        }
        return enters < leaves;
    }
    }
}

// The surface's normal at a point on it, in the shape's own frame. Not of length 1.
DEVICE Vec normal_at(const Shape& s, Vec p) {
    Vec size = s.size;
    switch (s.type) {
    case PLANE: return {0.0f, 0.0f, 1.0f};
    case SPHERE:
    case ELLIPSOID: return {p.x / (size.x * size.x), p.y / (size.y * size.y), p.z / (size.z * size.z)};
    case CAPSULE: return {p.x, p.y, p.z > size.z ? p.z - size.z : p.z < -size.z ? p.z + size.z : 0.0f};
    case CYLINDER:
        if (size.z - fabsf(p.z) < size.x - sqrtf(p.x * p.x + p.y * p.y)) return {0.0f, 0.0f, p.z};
        return {p.x, p.y, 0.0f};
    default: {
        float x = fabsf(fabsf(p.x) - size.x), y = fabsf(fabsf(p.y) - size.y), z = fabsf(fabsf(p.z) - size.z);
        return x <= y && x <= z ? Vec{p.x, 0.0f, 0.0f} : y <= z ? Vec{0.0f, p.y, 0.0f} : Vec{0.0f, 0.0f, p.z};
    }
    }
}
