// The triangles of which OpenGL makes shapes.
//
// Every shape is a sheet of rows and columns of corners, as OpenGL gets them: a sphere's rows go from pole to pole, a
// capsule's through both its half spheres and the cylinder between them, a cylinder's through a cap, the side and the
// other cap, a box's through its six faces. Seen from outside columns go to the right where rows go up. A cell of the
// sheet is two triangles; along which of its diagonals it is cut is the driver's choice. None has 256 rows or columns.

struct Facet {
    int row, column, half;
};

DEVICE bool same(const Facet& a, const Facet& b) { return a.row == b.row && a.column == b.column && a.half == b.half; }

struct Corner {
    Vec point, normal;
};

// What the columns, the rows and the normal of a box's face go along: 0 for x, ...
DEVICE void face_axes(int face, int& column, int& row, int& out) {
    out = face >> 1;
    column = out == 0 ? 1 : 0;
    row = out == 2 ? 1 : 2;
}

// Faces are numbered -x, +x, -y, ...: seen from outside, rows of -x, +y and -z go down along their axis.
DEVICE bool face_is_flipped(int face) { return face == 0 || face == 3 || face == 4; }

DEVICE Corner corner_at(const Assets& assets, const Shape& s, int row, int column) {
    const int half = assets.stacks / 2, stacks = assets.stacks, corners = assets.slices + 1;
    const float* t = assets.tables;
    Vec size = s.size;
    if (s.type == PLANE) {
        const Grid& grid = assets.grids[s.grid];
        return {{t[grid.x + column], t[grid.y + row], 0.0f}, {0.0f, 0.0f, 1.0f}};
    }
    if (s.type == BOX) {
        int lines = assets.quads + 1, face = row / lines, a, b, out;
        face_axes(face, a, b, out);
        float step = 2.0f / (float)assets.quads, p[3], n[3] = {0.0f, 0.0f, 0.0f};
        int line = row - face * lines;
        p[a] = step * (float)column - 1.0f;
        p[b] = step * (float)(face_is_flipped(face) ? assets.quads - line : line) - 1.0f;
        p[out] = n[out] = face & 1 ? 1.0f : -1.0f;
        return {{p[0] * size.x, p[1] * size.y, p[2] * size.z}, {n[0], n[1], n[2]}};
    }
    float c = t[column], n = t[corners + column];
    const float *cosines = t + 2 * corners, *sines = cosines + stacks + 1;
    if (s.type == CYLINDER) {
        int side = row - half - 1;
        if (side >= 0 && side <= stacks)
            return {{c * size.x, n * size.y, (2.0f * (float)side / (float)stacks - 1.0f) * size.z},
                    {c / size.x, n / size.y, 0.0f}};
        float sign = side < 0 ? -1.0f : 1.0f, r = (float)(side < 0 ? row : 2 * half + stacks + 2 - row) / (float)half;
        return {{c * r * size.x, n * r * size.y, sign * size.z}, {0.0f, 0.0f, sign}};
    }
    float offset = 0.0f;
    if (s.type == CAPSULE) {
        if (row > half && row < half + stacks)
            return {{c * size.x, n * size.y, (2.0f * (float)(row - half) / (float)stacks - 1.0f) * size.z},
                    {c / size.x, n / size.y, 0.0f}};
        offset = row <= half ? -size.z : size.z;
        row = row <= half ? row : row - stacks;
        size.z = (size.x + size.y) * 0.5f;
    }
    Vec u = {c * cosines[row], n * cosines[row], sines[row]};
    return {{u.x * size.x, u.y * size.y, u.z * size.z + offset}, {u.x / size.x, u.y / size.y, u.z / size.z}};
}

// Rows and columns that a shape's corners have at most.
DEVICE int corners_of(const Assets& assets, const Shape& s) {
    if (s.type == PLANE) return assets.grids[s.grid].columns * assets.grids[s.grid].rows;
    if (s.type == BOX) return 6 * (assets.quads + 1) * (assets.quads + 1);
    return (2 * assets.stacks + 3) * (assets.slices + 1);
}

DEVICE int columns_of(const Assets& assets, const Shape& s) {
    return s.type == PLANE ? assets.grids[s.grid].columns : s.type == BOX ? assets.quads + 1 : assets.slices + 1;
}

// The cell of a regular axis that a place from 0 to `cells` is in, and where in it.
DEVICE int cell_of(float place, int cells, float& inside) {
    int cell = most(0, least(cells - 1, (int)place));
    inside = place - (float)cell;
    return cell;
}

// The cell of a plane's axis that a place is in; how many cells a metre has helps to guess.
DEVICE int line_before(const float* lines, int count, float place, float a_metre) {
    int i = most(0, least(count - 2, 1 + (int)floorf((place - lines[1]) * a_metre)));
    while (i > 0 && place < lines[i]) --i;
    while (i < count - 2 && place >= lines[i + 1]) ++i;
    return i;
}

// The last row of cells: there, as in row 0, cells of round shapes are triangles, at a pole.
DEVICE int last_row(const Assets& assets, const Shape& s) {
    int half = assets.stacks / 2;
    return s.type == CYLINDER  ? 2 * half + assets.stacks + 1
           : s.type == CAPSULE ? 2 * assets.stacks - 1
                               : assets.stacks - 1;
}

// The triangle under a point of the true surface.
DEVICE Facet facet_under(const Assets& assets, const Shape& s, Vec p) {
    const int half = assets.stacks / 2, stacks = assets.stacks;
    Vec size = s.size;
    float a, b, whole = 1.0f;
    Facet f = {0, 0, 0};
    if (s.type == PLANE) {
        const Grid& grid = assets.grids[s.grid];
        const float *xs = assets.tables + grid.x, *ys = assets.tables + grid.y;
        f.column = line_before(xs, grid.columns, p.x, grid.across);
        f.row = line_before(ys, grid.rows, p.y, grid.up);
        // Where in the cell, times its area.
        float width = xs[f.column + 1] - xs[f.column], height = ys[f.row + 1] - ys[f.row];
        a = (p.x - xs[f.column]) * height, b = (p.y - ys[f.row]) * width;
        whole = width * height;
    } else if (s.type == BOX) {
        Vec n = normal_at(s, p);
        int face = n.x != 0.0f ? (n.x > 0.0f) : n.y != 0.0f ? 2 + (n.y > 0.0f) : 4 + (n.z > 0.0f), c, r, out;
        face_axes(face, c, r, out);
        float u[3] = {p.x / size.x, p.y / size.y, p.z / size.z}, across = u[c],
              up = face_is_flipped(face) ? -u[r] : u[r];
        f.column = cell_of((across + 1.0f) * 0.5f * (float)assets.quads, assets.quads, a);
        f.row = face * (assets.quads + 1) + cell_of((up + 1.0f) * 0.5f * (float)assets.quads, assets.quads, b);
    } else {
        float x = p.x / size.x, y = p.y / size.y, flat = sqrtf(x * x + y * y);
        f.column = cell_of(turns(x, y) * (float)assets.slices, assets.slices, a);
        float side = (p.z / size.z + 1.0f) * 0.5f * (float)stacks;
        if (s.type == CYLINDER) {
            if (size.z - fabsf(p.z) < (1.0f - flat) * size.x) {
                int cell = cell_of((p.z < 0.0f ? flat : 1.0f - flat) * (float)half, half, b);
                f.row = p.z < 0.0f ? cell : half + stacks + 2 + cell;
            } else {
                f.row = half + 1 + cell_of(side, stacks, b);
            }
        } else if (s.type == CAPSULE && fabsf(p.z) <= size.z) {
            f.row = half + cell_of(side, stacks, b);
        } else {
            float z = s.type != CAPSULE ? p.z / size.z : (p.z - (p.z > 0.0f ? size.z : -size.z)) / size.x;
            float up = turns(flat, fabsf(z)) * 2.0f * (float)stacks;  // stacks from the equator
            int cell = cell_of((float)half + (z < 0.0f ? -up : up), stacks, b);
            f.row = s.type == CAPSULE && p.z > 0.0f ? cell + stacks : cell;
        }
    }
    f.half = assets.nvidia ? (a > b ? 0 : 1) : (a + b < whole ? 0 : 1);
    if (s.type != PLANE && s.type != BOX) {
        if (f.row == 0) f.half = 1;
        else if (f.row == last_row(assets, s)) f.half = 0;
    }
    return f;
}

// Corners of a cell: 0 at its row and column, then around it.
DEVICE int corner_number(const Assets& assets, const Facet& f, int k) {
    if (assets.nvidia) return f.half == 0 ? k : (k == 0 ? 0 : k + 1);  // 012, 023
    return f.half == 0 ? (k == 2 ? 3 : k) : k + 1;                     // 013, 123
}

struct Place {
    int row, column;
};

DEVICE Place corner_place(const Assets& assets, const Facet& f, int k) {
    int number = corner_number(assets, f, k);
    return {f.row + (number >= 2), f.column + (number == 1 || number == 2)};
}

struct Triangle {
    Vec point[3];
};

DEVICE Triangle triangle_of(const Assets& assets, const Shape& s, const Facet& f) {
    Triangle t;
    for (int k = 0; k < 3; ++k) {
        Place at = corner_place(assets, f, k);
        t.point[k] = corner_at(assets, s, at.row, at.column).point;
    }
    return t;
}

// Where a ray meets a triangle's plane, as weights of its corners. False from behind, and where they hardly meet.
DEVICE bool meets(const Triangle& t, Vec o, Vec d, float (&weight)[3], float& depth) {
    Vec a = t.point[1] - t.point[0], b = t.point[2] - t.point[0], n = cross(d, b);
    float facing = dot(a, n);
    if (fabsf(facing) < 1e-24f) return false;
    float scale = 1.0f / facing;
    Vec to = o - t.point[0], q = cross(to, a);
    weight[1] = dot(to, n) * scale, weight[2] = dot(d, q) * scale;
    weight[0] = 1.0f - weight[1] - weight[2];
    depth = dot(b, q) * scale;
    return facing > 0.0f && depth > 0.0f;
}

// Across the edge that lies opposite corner k: the other half of a cell, here or next door.
DEVICE bool cross_edge(const Assets& assets, const Shape& s, Facet& f, int k) {
    const int first = assets.nvidia, last = last_row(assets, s), half = assets.stacks / 2;
    int to_row = 0, to_column = 0;
    if (f.half == 0 ? k == first : k == (first ? 2 : 1)) {  // the diagonal, which at a pole is a side
        if (f.row == 0) to_column = first ? 1 : -1;
        else if (f.row == last) to_column = first ? -1 : 1;
    } else if (f.half == 0) {
        if (k == 2) to_row = -1;
        else to_column = first ? 1 : -1;
    } else {
        if (k == 0) to_row = 1;
        else to_column = first ? -1 : 1;
    }
    f.row += to_row;
    if (s.type == CYLINDER && (f.row == half || f.row == half + assets.stacks + 1)) f.row += to_row;  // around the rim
    if (f.row < 0 || f.row > last) return false;
    f.column += to_column;
    if (f.column < 0) f.column += assets.slices;
    if (f.column >= assets.slices) f.column -= assets.slices;
    f.half = f.row == 0 ? 1 : f.row == last ? 0 : 1 - f.half;
    return true;
}

// The triangle that a ray meets where it meets the true surface at p, or close by. False if it passes all of them:
// triangles lie inside the surface.
LARGE bool find_facet(const Assets& assets, const Shape& s, Vec o, Vec d, Vec p, Facet& f) {
    f = facet_under(assets, s, p);
    if (s.type == PLANE || s.type == BOX) return true;
    for (int step = 0; step < 6; ++step) {
        float w[3], depth;
        if (!meets(triangle_of(assets, s, f), o, d, w, depth)) return false;
        int k = w[0] <= w[1] && w[0] <= w[2] ? 0 : w[1] <= w[2] ? 1 : 2;
        if (w[k] >= -1e-5f) return true;
        if (!cross_edge(assets, s, f, k)) return false;
    }
    return true;
}
