/* Tables: the numbers beside every chart. */

const scroll = (table, label) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
const heading = (text, attributes) => el("th", { scope: "col", ...attributes }, text);

function plainTable(label, columns, rows) {
  return scroll(el("table", {},
    el("thead", {}, el("tr", {}, columns.map((column) => heading(column)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, at) => (at ? el("td", {}, cell) : el("th", { scope: "row" }, cell))))))), label);
}

/** A table that is built when it is first opened: hundreds of them would slow the page. */
function foldedTable(summary, build) {
  const details = el("details", { class: "data" }, el("summary", {}, summary));
  details.addEventListener("toggle", () => {
    if (details.open && !details.querySelector(".scroll")) details.append(build());
  });
  return details;
}

function curveTable(panel, state) {
  const rows = linesOf(panel, state).flatMap((line) => line.points.map((point) => [
    line.name, number(point.x, 0), number(point.mean, Math.max(1, panel.digits)),
    point.std === null ? "–" : number(point.std, Math.max(1, panel.digits)), point.n ?? "–"]));
  return plainTable(`Curves on ${panel.title}`, ["System", panel.unit, "Mean", "Std", "Seeds"], rows);
}

/* ---- scores ---- */

function scoreCell(cell, digits) {
  if (!cell) return el("span", { class: "none" }, "–");
  const read = cell.at ? `read at ${cell.at}` : null;
  return [el("span", { class: "score", title: read }, number(cell.mean, digits),
    cell.std === null ? null : el("span", { class: "spread" }, ` ± ${number(cell.std, digits)}`)),
  cell.n === null || cell.n === undefined ? null : el("span", { class: "n", title: "seeds" }, ` n ${cell.n}`)];
}

function differenceCell(estimate, digits) {
  if (!estimate) return null;
  const [value, low, high] = estimate;
  const places = Math.max(...estimate.map(Math.abs)) >= 100 ? 0 : digits;
  const sure = low !== null && (low > 0 ? "better" : high < 0 ? "worse" : null);
  return el("span", { class: `difference ${sure || ""}` }, signed(value, places),
    low === null ? null : el("span", { class: "interval" }, ` ${interval(estimate, places)}`));
}

/** The system to compare with the rest: the reader's choice, or the first that is there and switched on. */
function chosenOf(systems, state) {
  const there = systems.filter((system) => system !== null && state.systems.has(system));
  return there.includes(state.ours) ? state.ours : there[0] ?? null;
}

function scoreTable(table, state) {
  const columns = table.columns.map((column, at) => ({ ...column, at })).filter((column) => (column.system === null ? state.published : state.systems.has(column.system)));
  const rows = table.rows.map((row, at) => ({ ...row, at })).filter((row) => state.shows(row.panel, row.title));
  if (!rows.length || !columns.length) return null;
  const chosen = chosenOf(table.columns.map((column) => column.system), state);
  const compared = table.differences[chosen];
  const mine = table.columns.findIndex((column) => column.system === chosen);
  const published = columns.filter((column) => column.system === null).length;
  const kind = (column) => (column.system !== null && column.system === chosen ? "chosen" : column.system === null ? "theirs" : "");
  const overall = chosen !== null && columns.some((column) => compared.overall[column.at]);
  return el("div", { class: "block" },
    el("h3", {}, table.title),
    scroll(el("table", { class: "scores" },
      el("thead", {},
        el("tr", { class: "groups" }, el("td", {}), columns.length > published ? heading("These runs", { colspan: columns.length - published, scope: "colgroup" }) : null,
          published ? heading("Published", { colspan: published, scope: "colgroup", class: "theirs" }) : null),
        el("tr", {}, heading("Task"), columns.map((column) => heading([column.system === null ? null : swatch(column.system), column.name], { class: kind(column) })))),
      el("tbody", {}, rows.map((row) => el("tr", { "data-panel": row.panel }, el("th", { scope: "row" }, row.title),
        columns.map((column) => el("td", { class: kind(column), "data-column": column.name }, scoreCell(row.cells[column.at], table.digits),
          chosen === null ? null : differenceCell(compared.tasks[row.at][column.at], table.digits)))))),
      overall ? el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, `Mean difference over the ${table.rows.filter((row) => row.cells[mine]).length} tasks of ${state.names[chosen]}`),
        columns.map((column) => el("td", { class: kind(column) }, differenceCell(compared.overall[column.at], table.digits))))) : null), table.title),
    table.missing.map((lacking) => el("p", { class: "missing" }, `Missing: ${lacking}.`)));
}

/* ---- where runs stand among published ones ---- */

function standingBlock(standing, state) {
  const rows = standing.rows.filter((row) => state.shows(row.panel, row.title));
  if (!rows.length || !state.systems.has(standing.system)) return null;
  const place = (run, published) => signed(run.z, 2) + (run.above === null ? "" : ` (above ${run.above} of ${published[2]})`);
  const plusMinus = ([value, spread], digits) => [number(value, digits), el("span", { class: "spread" }, ` ± ${number(spread, digits)}`)];
  const meanCell = (mean) => [signed(mean.z, 2), mean.error === null ? null : el("span", { class: "spread" }, ` ± ${number(mean.error, 2)}`)];
  return el("div", { class: "block standing" },
    el("h3", {}, standing.title),
    plainTable("Mean z-scores", ["Mean z-score of", "Runs", "Tasks", "z ± standard error"], standing.means.map((mean) => [mean.of, mean.runs, mean.tasks, meanCell(mean)])),
    standingChart(standing, rows),
    plainTable(standing.title, ["Task", "Published", "Runs", "Our runs", "z", "Mean z"], rows.map((row) => [row.title, plusMinus(row.published, standing.digits), row.published[2],
      row.runs.map((run) => number(run.score, standing.digits)).join(", "), row.runs.map((run) => place(run, row.published)).join(", "), meanCell(row.mean)])));
}

/* ---- Atari's aggregates ---- */

/** All over the same games. Only the table of the most games has charts: others would make the page long. */
function aggregateBlock(atari, state, charts) {
  const shown = (system) => (system === null ? state.published : state.systems.has(system));
  const rows = atari.rows.filter((row) => shown(row.system));
  const estimateText = (estimate) => [number(estimate[0], 3), el("span", { class: "interval" }, ` ${interval(estimate, 3)}`)];
  const chosen = chosenOf(rows.map((row) => row.system), state);
  const wins = new Map(atari.improvements.filter((one) => one.system === chosen).map((one) => [one.other, one.probability]));
  const beaten = rows.filter((row) => wins.has(row.name));
  const figure = (title, told, values, scale) => el("figure", {}, el("figcaption", {}, el("h3", {}, title), el("p", {}, told)), intervalChart(title, values, scale));
  return [
    el("h3", {}, atari.title),
    atari.notes.map((note) => el("p", { class: "lead" }, note)),
    charts && el("div", { class: "charts" },
      atari.metrics.map((metric) => figure(metric, `over ${many(atari.games, "game")}, ${metric === "Optimality gap" ? "smaller" : "larger"} is better`,
        rows.map((row) => ({ ...row, estimate: row.metrics[metric] })), {})),
      beaten.length ? figure("Probability of improvement", `that ${state.names[chosen]} beats …`,
        beaten.map((row) => ({ ...row, estimate: wins.get(row.name) })), { reference: 0.5, from: 0, to: 1 }) : null),
    plainTable(atari.title, ["System", "Runs", ...atari.metrics, `${state.names[chosen]} beats it`],
      rows.map((row) => [row.name, row.runs || "means", ...atari.metrics.map((metric) => estimateText(row.metrics[metric])),
        wins.has(row.name) ? estimateText(wins.get(row.name)) : "–"])),
    atari.peers.length && foldedTable("Published aggregates over all 26 games", () => plainTable("Published aggregates", ["System", "Runs a game", "Median", "Mean", "IQM", "IQM over"],
      atari.peers.map((peer) => [peer.system, peer.runs_per_game, peer.median_hns, peer.mean_hns, peer.iqm_hns, peer.iqm_over]))),
  ];
}

/* ---- searches ---- */

const settingText = (value) => (typeof value === "number" && value !== 0 && Math.abs(value) < 0.01 ? value.toExponential() : String(value));

function searchBlock(search) {
  return el("div", { class: "block" },
    el("h3", {}, search.title),
    parallelChart(search),
    plainTable(search.title, ["Rank", ...search.names, search.unit, "Return", "Seeds"], search.rows.map((row, at) => [at + 1,
      ...row.values.map(settingText), steps(row.steps), [number(row.cell.mean, search.digits),
        row.cell.std === null ? null : el("span", { class: "spread" }, ` ± ${number(row.cell.std, search.digits)}`)], row.cell.n])),
    el("p", { class: "lead" }, "The best settings, for drq train --config:"), el("pre", { class: "best", tabindex: 0 }, search.best));
}

/* ---- grids: heat maps that are tables ---- */

function gridBlock(grid) {
  const means = grid.panels.flatMap((panel) => panel.cells.flat()).filter(Boolean).map((cell) => cell.mean);
  const [low, high] = [Math.min(...means), Math.max(...means)];
  const [columnName, rowName, panelName] = grid.names;
  const warmth = (mean) => (high > low ? (mean - low) / (high - low) : 0.5);
  const heat = (cell) => {
    if (!cell) return el("td", { class: "none", title: "no run has reached the budget" }, "–");
    return el("td", { class: warmth(cell.mean) > 0.6 ? "hot" : "", style: `--heat:${(warmth(cell.mean) * 88 + 6).toFixed(0)}%`, title: `seeds: ${cell.n}` },
      number(cell.mean, grid.digits), cell.std === null ? null : el("span", { class: "spread" }, `± ${number(cell.std, grid.digits)}`));
  };
  return el("figure", { class: "grid", "data-panel": grid.panel },
    el("figcaption", {}, el("h3", {}, `${grid.title}: ${grid.task}`), el("p", {}, `at ${grid.budget}`)),
    el("div", { class: "heatmaps" }, grid.panels.map((panel) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${grid.title}, ${grid.task}` },
      el("table", { class: "heat" },
        panel.value.map((value) => el("caption", {}, `${panelName} ${settingText(value)}`)),
        el("thead", {},
          el("tr", { class: "groups" }, el("td", {}), heading(columnName, { colspan: grid.columns.length, scope: "colgroup" })),
          el("tr", {}, heading(rowName), grid.columns.map((value) => heading(settingText(value))))),
        el("tbody", {}, grid.rows.map((value, at) => el("tr", {}, el("th", { scope: "row" }, settingText(value)), panel.cells[at].map(heat)))))))));
}

/* ---- runs ---- */

function costTable(data, state) {
  const rows = data.systems.map((system, index) => {
    const runs = data.runs.filter((run) => run.system === index && run.seconds !== null);
    const rates = runs.map((run) => run.rate).sort((a, b) => a - b);
    const half = (rates.length - 1) / 2;
    const total = runs.reduce((sum, run) => sum + run.seconds, 0);
    const finished = data.runs.filter((run) => run.system === index && run.status === "finished").length;
    const all = data.runs.filter((run) => run.system === index).length;
    return state.systems.has(index) && system.ours
      ? [[swatch(index), system.name], `${finished} of ${all}`, duration(runs.length ? total : null), duration(runs.length ? total / runs.length : null),
        rates.length ? number((rates[Math.floor(half)] + rates[Math.ceil(half)]) / 2, 0) : "–"] : null;
  }).filter(Boolean);
  return rows.length ? plainTable("Cost of each system", ["System", "Finished", "Machine time", "Mean a run", "Median steps/s"], rows) : null;
}

const RUN_COLUMNS = ["Show", "Task", "System", "Seed", "State", "Steps", "Last return", "Wall-clock", "Steps/s", "More"];

/** A row below a run's with where it lies, what went wrong, its videos and its configuration. */
function runDetails(run, data) {
  return el("tr", { class: "detail" }, el("td", { colspan: RUN_COLUMNS.length },
    el("p", {}, run.folder),
    run.error ? el("p", { class: "error" }, run.error) : null,
    run.videos.length ? el("ul", { class: "videos", "aria-label": "Videos" }, run.videos.map(([name, href]) => el("li", {}, el("a", { href }, name)))) : null,
    run.config === null ? null : el("pre", { class: "config", tabindex: 0, "aria-label": "Configuration" }, data.configs[run.config])));
}

function runRow(run, index, data, state, longest, redraw) {
  const box = el("input", { type: "checkbox", "aria-label": `Show ${state.names[run.system]}, ${run.title}, seed ${run.seed}`, "data-run": index });
  box.checked = !state.runsOff.has(index);
  box.addEventListener("change", () => {
    state.runsOff[box.checked ? "delete" : "add"](index);
    redraw();
  });
  const videos = run.videos.length ? `, ${run.videos.length} video${run.videos.length > 1 ? "s" : ""}` : "";
  const more = el("button", { type: "button", "aria-expanded": "false" }, run.config === null ? "source" : `settings${videos}`);
  const row = el("tr", { "data-panel": run.panel },
    el("td", {}, box),
    el("th", { scope: "row" }, run.title),
    el("td", { class: "text" }, swatch(run.system), state.names[run.system]),
    el("td", {}, run.seed),
    el("td", { class: "text" }, el("span", { class: `status ${run.status.replace(" ", "-")}`, title: run.error || null }, run.status)),
    el("td", {}, steps(run.step ?? 0), run.budget ? el("span", { class: "spread" }, ` / ${steps(run.budget)}`) : null),
    el("td", {}, number(run.last, run.digits)),
    el("td", { class: "time" }, duration(run.seconds), run.seconds === null ? null : el("i", { class: "bar", style: `width:${((run.seconds / longest) * 100).toFixed(1)}%`, "aria-hidden": "true" })),
    el("td", {}, run.rate === null ? "–" : number(run.rate, run.rate < 10 ? 1 : 0)),
    el("td", { class: "text more" }, more));
  more.addEventListener("click", () => {
    const open = more.getAttribute("aria-expanded") === "true";
    more.setAttribute("aria-expanded", String(!open));
    if (open) row.nextElementSibling.remove();
    else row.after(runDetails(run, data));
  });
  return row;
}

function runTable(data, state, redraw) {
  const rows = data.runs.map((run, index) => ({ run, index })).filter(({ run }) => state.shows(run.panel, run.title) && state.systems.has(run.system));
  const longest = Math.max(1, ...rows.map(({ run }) => run.seconds ?? 0));
  return el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Runs" }, el("table", { class: "runs" },
    el("thead", {}, el("tr", {}, RUN_COLUMNS.map((name) => heading(name)))),
    el("tbody", {}, rows.map(({ run, index }) => runRow(run, index, data, state, longest, redraw)))));
}
