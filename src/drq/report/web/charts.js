/* Elements, numbers and charts. Text from the data only ever becomes a text node or an attribute value. */

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/* ---- numbers ---- */

const MINUS = "\u2212";

function number(value, digits) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return value < 0 && /[1-9]/.test(text) ? MINUS + text : text;
}

const signed = (value, digits) => (number(value, digits).startsWith(MINUS) ? "" : "+") + number(value, digits);

function steps(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  return value >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(3)}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function interval(estimate, digits) {
  return estimate[1] === null ? "" : `[${number(estimate[1], digits)}, ${number(estimate[2], digits)}]`;
}

/** Mean, sample standard deviation and count of the numbers that are there. */
function summarise(values) {
  const found = values.filter((value) => value !== null && value !== undefined);
  const n = found.length;
  if (!n) return null;
  const mean = found.reduce((sum, value) => sum + value, 0) / n;
  const std = n > 1 ? Math.sqrt(found.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1)) : null;
  return { mean, std, n };
}

/** Round numbers that span [low, high], about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const found = [];
  for (let at = Math.floor(low / unit + 1e-9); at <= Math.ceil(high / unit - 1e-9); at += 1) found.push(+(at * unit).toPrecision(12));
  return found;
}

/** Decimals that tell round numbers apart. */
function decimals(marks) {
  return Math.max(...marks.map((value) => (String(value).split(".")[1] ?? "").length));
}

/* ---- marks: a colour and a shape for each system, so that neither has to be told apart alone ---- */

const COLOURS = 8;
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "M-3.6-3.6h7.2v7.2h-7.2Z", "M0-4.8L4.6 3.6H-4.6Z", "M0-5L5 0L0 5L-5 0Z",
  "M0 4.8L4.6-3.6H-4.6Z", "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z", "M0-5L1.5-1.5L5 0L1.5 1.5L0 5L-1.5 1.5L-5 0L-1.5-1.5Z",
];
const colour = (system) => (system === null ? "var(--published)" : `var(--s${system % COLOURS})`);
const shape = (system) => (system === null ? SHAPES[3] : SHAPES[system % SHAPES.length]);

function mark(system, x, y) {
  const style = system === null ? "fill:var(--paper);stroke:var(--published);stroke-width:1.5" : `fill:${colour(system)}`;
  return svg("path", { d: shape(system), transform: `translate(${x} ${y})`, style, class: "mark" });
}

function swatch(system) {
  return svg("svg", { class: "swatch", viewBox: "-12 -7 24 14", "aria-hidden": "true" },
    svg("line", { x1: -12, x2: 12, y1: 0, y2: 0, class: system === null ? "mean published" : "mean", style: `stroke:${colour(system)}` }),
    system === null ? null : mark(system, 0, 0));
}

/* ---- learning curves ---- */

const FRAME = { width: 420, height: 240, right: 14, top: 10, bottom: 38 };

/** What a panel shows now: a line of {x, mean, std, n} points for each system and published curve. */
function linesOf(panel, state) {
  const lines = [];
  for (const series of panel.series) {
    if (!state.systems.has(series.system)) continue;
    const on = Object.entries(series.runs).filter(([run]) => !state.runsOff.has(+run)).map(([, values]) => values);
    const points = series.x.map((x, at) => ({ x, ...summarise(on.map((values) => values[at])) })).filter((point) => point.n);
    const name = state.names[series.system] + (series.unfinished ? ", unfinished" : "");
    if (points.length) lines.push({ system: series.system, name, unfinished: series.unfinished, points, runs: on, x: series.x });
  }
  if (state.published) {
    for (const curve of panel.published) {
      const points = curve.x.map((x, at) => ({ x, mean: curve.mean[at], std: curve.std[at], n: curve.n[at] }));
      lines.push({ system: null, name: curve.name, points, runs: [], x: curve.x });
    }
  }
  return lines;
}

function bandPath(points, px, py) {
  const wide = points.filter((point) => point.std !== null);
  if (wide.length < 2) return null;
  const up = wide.map((p) => `${px(p.x)} ${py(p.mean + p.std)}`);
  const down = wide.map((p) => `${px(p.x)} ${py(p.mean - p.std)}`).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}

const linePath = (points, px, py) => `M${points.map((p) => `${px(p.x)} ${py(p.mean)}`).join("L")}`;

function nearest(points, x) {
  return points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best));
}

/** The chart of one panel with its reading; returns nothing to draw when every line is off. */
function curveChart(panel, state) {
  const found = linesOf(panel, state);
  const own = found.filter((line) => line.system !== null);
  if (!own.length) return el("p", { class: "empty" }, "Nothing is switched on for this task.");
  const { width, height, right, top, bottom } = FRAME;
  const end = Math.max(...own.flatMap((line) => line.points.map((point) => point.x))) || 1;
  const lines = found.filter((line) => line.points[0].x <= end);
  const training = panel.training.filter((one) => state.systems.has(one.system) && !state.runsOff.has(one.run))
    .map((one) => ({ system: one.system, points: one.x.map((x, at) => ({ x, mean: one.y[at] })) }));
  const inside = [...lines, ...training].flatMap((line) => line.points.filter((point) => point.x <= end));
  const low = Math.min(0, ...inside.map((point) => point.mean - (point.std ?? 0) * (point.mean < 0)));
  const high = Math.min(panel.top ?? Infinity, Math.max(...inside.map((point) => point.mean + (point.std ?? 0)), low + 1e-6));
  const yTicks = ticks(low, high, 4);
  const [y0, y1] = [yTicks[0], yTicks[yTicks.length - 1]];
  const yLabels = yTicks.map((y) => number(y, decimals(yTicks)));
  const left = 27 + 7 * Math.max(5, ...yLabels.map((label) => label.length));
  const fixed = (value) => +value.toFixed(1);
  const px = (x) => fixed(left + (x / end) * (width - left - right));
  const py = (y) => fixed(height - bottom - ((y - y0) / (y1 - y0 || 1)) * (height - top - bottom));
  const clip = `clip-${panel.number}`;
  const plot = svg("g", { "clip-path": `url(#${clip})` });
  for (const games of training) {
    if (games.points.length > 1) plot.append(svg("path", { d: linePath(games.points, px, py), class: "single training", style: `stroke:${colour(games.system)}` }));
  }
  for (const line of [...lines].reverse()) {
    const style = `stroke:${colour(line.system)};fill:${colour(line.system)}`;
    const band = bandPath(line.points, px, py);
    if (band) plot.append(svg("path", { d: band, class: "band", style }));
    if (state.singles) {
      for (const values of line.runs) {
        const points = line.x.map((x, at) => ({ x, mean: values[at] })).filter((point) => point.mean !== null);
        if (points.length > 1) plot.append(svg("path", { d: linePath(points, px, py), class: "single", style }));
      }
    }
    if (line.points.length > 1) {
      plot.append(svg("path", { d: linePath(line.points, px, py), class: line.system === null ? "mean published" : line.unfinished ? "mean unfinished" : "mean", style }));
    }
  }
  const marks = [...lines].reverse().filter((line) => line.system !== null || line.points.length === 1).map((line) => {
    const last = line.points[line.points.length - 1];
    return last.x <= end ? mark(line.system, px(last.x), py(last.mean)) : null;
  });
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const dots = svg("g", {});
  const reading = el("div", { class: "reading", "aria-live": "polite" });
  const grid = [...new Set(own.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
  let at = grid.length - 1;

  function read(index, moved) {
    at = Math.max(0, Math.min(grid.length - 1, index));
    const x = grid[at];
    cursor.setAttribute("visibility", moved ? "visible" : "hidden");
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    const values = lines.map((line) => {
      const point = nearest(line.points, x);
      const gap = line.points.length > 1 ? (line.points[line.points.length - 1].x - line.points[0].x) / (line.points.length - 1) : end / 50;
      return { line, point: Math.abs(point.x - x) <= gap ? point : null };
    });
    dots.replaceChildren(...(moved ? values.filter(({ point }) => point && point.x <= end)
      .map(({ line, point }) => svg("circle", { cx: px(point.x), cy: py(point.mean), r: 3, class: "dot", style: `fill:${colour(line.system)}` })) : []));
    reading.replaceChildren(
      el("p", { class: "at" }, `${moved ? "At" : "Last, at"} ${steps(x)} ${panel.unit}`),
      el("ul", {}, values.map(({ line, point }) => el("li", {}, swatch(line.system), el("span", { class: "name", title: line.name }, line.name),
        el("span", { class: "value" }, point ? number(point.mean, panel.digits) : "–",
          point && point.std !== null ? el("span", { class: "spread" }, ` ± ${number(point.std, panel.digits)}`) : null),
        el("span", { class: "n", title: "seeds" }, point?.n ? `n ${point.n}` : "")))));
  }

  const xTicks = ticks(0, end, 5).filter((x) => x <= end * 1.001);
  const chart = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", tabindex: 0,
    "aria-label": `Learning curves on ${panel.title}: ${lines.map((line) => line.name).join(", ")}. The same numbers are in the table below.`,
    onpointermove: (event) => {
      const box = chart.getBoundingClientRect();
      const x = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * end;
      read(grid.indexOf(grid.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best))), true);
    },
    onpointerleave: () => read(grid.length - 1, false),
    onblur: () => read(grid.length - 1, false),
    onkeydown: (event) => {
      const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: grid.length - 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      read(move, true);
    },
  },
    svg("clipPath", { id: clip }, svg("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom })),
    yTicks.map((y, at) => [svg("line", { class: "rule", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, yLabels[at])]),
    xTicks.map((x) => svg("text", { x: px(x), y: height - bottom + 16, "text-anchor": "middle" }, steps(x))),
    svg("text", { x: width - right, y: height - 3, "text-anchor": "end", class: "axis" }, panel.unit),
    svg("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "axis" }, "return"),
    plot, cursor, marks, dots);
  read(grid.length - 1, false);
  return [chart, reading];
}

/* ---- points with intervals, one row a system ---- */

function intervalChart(title, rows, { reference, from, to }) {
  const [width, left, right, top, step] = [490, 206, 14, 8, 22];
  const height = top + rows.length * step + 26;
  const ends = rows.flatMap(({ estimate }) => estimate.filter((value) => value !== null));
  const marksAt = ticks(from ?? Math.min(0, ...ends), to ?? Math.max(...ends), 4);
  const [x0, x1] = [marksAt[0], marksAt[marksAt.length - 1]];
  const px = (x) => +(left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right)).toFixed(1);
  const shorten = (name) => (name.length > 29 ? `${name.slice(0, 28)}…` : name);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `${title}. The same numbers are in the table below.` },
    marksAt.map((x) => [svg("line", { class: "rule", x1: px(x), x2: px(x), y1: top, y2: height - 24 }),
      svg("text", { x: px(x), y: height - 9, "text-anchor": "middle" }, number(x, decimals(marksAt)))]),
    reference === undefined ? null : svg("line", { class: "cursor", x1: px(reference), x2: px(reference), y1: top, y2: height - 24 }),
    rows.map(({ name, system, estimate }, index) => {
      const y = top + (index + 0.5) * step;
      return [svg("text", { x: left - 10, y: y + 3.5, "text-anchor": "end" }, svg("title", {}, name), shorten(name)),
        estimate[1] === null ? null : svg("line", { class: "range", x1: px(estimate[1]), x2: px(estimate[2]), y1: y, y2: y, style: `stroke:${colour(system)}` }),
        mark(system, px(estimate[0]), y)];
    }));
}

/* ---- runs among published ones: a row a task, a mark a run, and the means with their 95% intervals below ---- */

function standingChart(standing, rows) {
  const [width, left, right, top, step] = [520, 160, 14, 8, 20];
  const below = standing.means.length * step + 10;
  const height = top + rows.length * step + below + 40;
  const marks = rows.flatMap((row) => row.runs.map((run) => Math.abs(run.z)));
  const furthest = standing.means.map((mean) => Math.abs(mean.z) + (mean.reach ?? 0));
  const reach = Math.max(3, Math.ceil(Math.max(...marks, ...furthest)));
  const px = (z) => +(left + ((z + reach) / (2 * reach)) * (width - left - right)).toFixed(1);
  const foot = height - 36;
  const label = (text, y, attributes) => svg("text", { x: left - 10, y: y + 3.5, "text-anchor": "end", ...attributes }, text);
  const marksAt = ticks(-reach, reach, 6);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `${standing.title}. The same numbers are in the table below.` },
    svg("rect", { class: "usual", x: px(-1), y: top, width: px(1) - px(-1), height: foot - top }),
    marksAt.map((z) => [svg("line", { class: z ? "rule" : "cursor", x1: px(z), x2: px(z), y1: top, y2: foot }),
      svg("text", { x: px(z), y: foot + 15, "text-anchor": "middle" }, number(z, decimals(marksAt)))]),
    svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", class: "axis" }, "z-score among published runs"),
    rows.map((row, index) => {
      const y = top + (index + 0.5) * step;
      return [label(row.title, y), row.runs.map((run) => fill(mark(standing.system, px(run.z), y), {}, [svg("title", {}, `seed ${run.seed}: ${number(run.z, 2)}`)]))];
    }),
    standing.means.map((mean, index) => {
      const y = top + rows.length * step + 10 + (index + 0.5) * step;
      const ends = mean.reach === null ? null : [px(mean.z - mean.reach), px(mean.z + mean.reach)];
      return [label(index ? "of seeds all tasks have" : "mean of all runs", y, { class: "strong" }),
        ends ? svg("line", { class: "range", x1: ends[0], x2: ends[1], y1: y, y2: y, style: `stroke:${colour(standing.system)}` }) : null,
        mark(standing.system, px(mean.z), y)];
    }));
}

/* ---- searches: parallel coordinates, an axis a setting, a line from its values to its return ---- */

function axisOf(values) {
  const numbers = values.every((value) => typeof value === "number");
  const found = [...new Set(values)];
  if (!numbers) return { at: (value) => (found.indexOf(value) + 0.5) / found.length, marks: found };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const scale = low > 0 && high / low >= 20 ? Math.log10 : (value) => value;
  const at = (value) => (high > low ? (scale(value) - scale(low)) / (scale(high) - scale(low)) : 0.5);
  const few = found.sort((a, b) => a - b);
  return { at, marks: few.length <= 6 ? few : [low, high] };
}

function parallelChart(search) {
  const [width, height, top, bottom, side] = [760, 300, 34, 16, 90];
  const names = [...search.names, "return"];
  const columns = names.map((_, at) => search.rows.map((row) => (at < search.names.length ? row.values[at] : row.cell.mean)));
  const axes = columns.map(axisOf);
  const px = (at) => +(side + (at / (names.length - 1)) * (width - 2 * side)).toFixed(1);
  const py = (at, value) => +(height - bottom - axes[at].at(value) * (height - top - bottom)).toFixed(1);
  const furthest = Math.max(...search.rows.map((row) => row.steps));
  const text = (at, value) => (at < search.names.length ? settingText(value) : number(value, search.digits));
  const shorten = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart parallel", role: "img", "aria-label": `Settings and returns of ${search.title}. The same numbers are in the table below.` },
    search.rows.map((row, place) => svg("path", {
      d: `M${names.map((_, at) => `${px(at)} ${py(at, columns[at][place])}`).join("L")}`,
      class: `setting${place ? "" : " best"}${row.steps < furthest ? " stopped" : ""}`,
    }, svg("title", {}, `${search.names.map((name, at) => `${name} ${text(at, row.values[at])}`).join(", ")}: ${number(row.cell.mean, search.digits)}`))).reverse(),
    names.map((name, at) => [svg("line", { class: "cursor", x1: px(at), x2: px(at), y1: top, y2: height - bottom }),
      svg("text", { x: px(at), y: 14, "text-anchor": "middle", class: "strong" }, name.length > 22 ? svg("title", {}, name) : null, shorten(name)),
      axes[at].marks.map((value) => svg("text", { x: px(at) + (at ? 6 : -6), y: py(at, value) + 4, "text-anchor": at ? "start" : "end", class: "value" }, shorten(text(at, value))))]));
}
