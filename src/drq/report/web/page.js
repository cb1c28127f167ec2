/* The page: what is switched on, and drawing it again when that changes. */

const data = JSON.parse(document.getElementById("data").textContent);
const body = (section) => document.querySelector(`#${section} > .body`);
const benchmarksOf = new Map();
function group() {
  benchmarksOf.clear();
  data.panels.forEach((panel, number) => {
    panel.number = number;
    benchmarksOf.set(panel.benchmark, [...(benchmarksOf.get(panel.benchmark) ?? []), panel]);
  });
}
group();
const tasks = new Map(data.runs.map((run) => [run.panel, run.title]));
const twice = (title) => [...tasks.values()].filter((other) => other === title).length > 1;

const state = {
  names: data.systems.map((system) => system.name),
  systems: new Set(data.systems.flatMap((system, index) => (system.on ? [index] : []))),
  ours: 0,
  tasks: new Set(tasks.keys()),
  search: "",
  runsOff: new Set(),
  published: true,
  singles: false,
  shows(panel, title) {
    return this.tasks.has(panel) && `${panel} ${title}`.toLowerCase().includes(this.search);
  },
};

function many(count, noun) {
  return `${number(count, 0)} ${noun}${count === 1 ? "" : "s"}`;
}

/* ---- drawing ---- */

function drawCurves() {
  const opened = new Set([...document.querySelectorAll("#curves .panel details[open]")].map((node) => node.closest(".panel").dataset.panel));
  const groups = [...benchmarksOf].map(([title, panels]) => {
    const figures = panels.filter((panel) => state.shows(panel.id, panel.title)).map((panel) => {
      const table = foldedTable("Table", () => curveTable(panel, state));
      table.open = opened.has(panel.id);
      return el("figure", { class: "panel", "data-panel": panel.id }, el("figcaption", {}, el("h4", {}, panel.title)), curveChart(panel, state), table);
    });
    return figures.length ? [el("h3", {}, title), el("div", { class: "charts" }, figures)] : [];
  });
  body("curves").replaceChildren(...groups.flat());
  if (!groups.flat().length) {
    body("curves").append(el("p", { class: "empty" }, data.panels.length ? "No task matches the filter." : "No run has an evaluation yet."));
  }
}

function place(section, blocks) {
  const found = [blocks].flat(Infinity).filter(Boolean);
  document.getElementById(section).hidden = !found.length;
  body(section).replaceChildren(...found);
}

function drawTables() {
  place("scores", data.tables.map((table) => scoreTable(table, state)));
  place("standing", data.standings.map((standing) => standingBlock(standing, state)));
  const games = data.atari.filter((atari) => atari.of.some((system) => state.systems.has(system)));
  place("atari", games.map((atari, at) => aggregateBlock(atari, state, at === 0)));
  place("searches", data.searches.filter((search) => state.shows(search.panel, search.task)).map(searchBlock));
  place("grids", data.grids.filter((grid) => state.shows(grid.panel, grid.task)).map(gridBlock));
}

function drawRuns() {
  place("runs", [costTable(data, state), runTable(data, state, drawCurves)]);
}

function draw() {
  drawCurves();
  drawTables();
  drawRuns();
}

/* ---- controls ---- */

function chip(label, checked, change, attributes) {
  const box = el("input", { type: "checkbox", ...attributes });
  box.checked = checked;
  box.addEventListener("change", () => {
    change(box.checked);
    draw();
  });
  return el("label", { class: "chip" }, box, label);
}

function toggleIn(set, member) {
  return (on) => set[on ? "add" : "delete"](member);
}

function allOrNone(group, set, members) {
  const set_all = (on) => () => {
    for (const member of members) set[on ? "add" : "delete"](member);
    for (const box of document.querySelectorAll(`#controls input[data-group="${group}"]`)) box.checked = on;
    draw();
  };
  return el("span", { class: "all" }, el("button", { type: "button", onclick: set_all(true) }, "all"), el("button", { type: "button", onclick: set_all(false) }, "none"));
}

function systemControls() {
  const chooser = el("select", { id: "ours", onchange: (event) => { state.ours = +event.target.value; drawTables(); } },
    state.names.map((name, index) => el("option", { value: index }, name)));
  return el("fieldset", { class: "systems" },
    el("legend", {}, "Systems ", data.systems.length > 2 ? allOrNone("system", state.systems, data.systems.keys()) : null),
    el("div", { class: "chips" },
      data.systems.map((system, index) => chip([swatch(index), system.name], system.on, toggleIn(state.systems, index), { "data-group": "system" }))),
    el("div", { class: "chips" },
      chip([swatch(null), "published"], true, (on) => { state.published = on; }, { id: "published" }),
      chip("single runs", false, (on) => { state.singles = on; }, { id: "singles" })),
    data.systems.length > 1 ? el("label", { class: "choose" }, "Compare ", chooser, " with the rest") : null);
}

function taskControls() {
  const search = el("input", { type: "search", id: "search", placeholder: "Find a task", "aria-label": "Find a task", oninput: () => {
    state.search = search.value.trim().toLowerCase();
    draw();
  } });
  const boxes = [...tasks].map(([panel, title]) => chip(twice(title) ? `${title} (${panel.split(":")[0]})` : title, true, toggleIn(state.tasks, panel), { "data-group": "task", value: panel }));
  return el("fieldset", { class: "tasks" },
    el("legend", {}, "Tasks ", tasks.size > 2 ? allOrNone("task", state.tasks, tasks.keys()) : null),
    search, el("div", { class: "chips" }, boxes));
}

/* ---- what is known of all runs ---- */

function tell() {
  const finished = data.runs.filter((run) => run.status === "finished").length;
  document.getElementById("summary").textContent = [many(data.runs.length, "run"), finished < data.runs.length ? `${finished} finished` : null,
    many(tasks.size, "task"), many(data.systems.length, "system")].filter(Boolean).join(" · ");
  const list = el("ul", {}, data.warnings.map((warning) => el("li", {}, warning)));
  const fold = el("details", { open: data.warnings.length <= 6 }, el("summary", {}, many(data.warnings.length, "thing"), " to know about these results"), list);
  document.getElementById("warnings").replaceChildren(fold);
  document.getElementById("warnings").hidden = !data.warnings.length;
}

/* ---- once ---- */

tell();
document.getElementById("controls").append(systemControls(), tasks.size > 1 ? taskControls() : "");
document.querySelector("#sources pre").textContent = data.sources;
draw();
document.getElementById("contents").append(...[...document.querySelectorAll("main > section:not([hidden])")].map((section) =>
  el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
