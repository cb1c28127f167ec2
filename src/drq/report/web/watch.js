/* What `drq watch` adds: how far the runs are, and results as they come. */

const LOOK_EVERY = 2000;
const STATES = ["running", "failed", "stopped", "waiting", "finished"];
const live = el("section", { id: "live", "aria-label": "Now" }, el("h2", {}, "Now"), el("p", { class: "lead" }), el("div", { class: "body" }));
const movie = el("video", { controls: true, autoplay: true, muted: true, loop: true, playsinline: true, width: 240 });
movie.muted = true;  // else no browser begins to play by itself
const movieName = el("figcaption");
document.getElementById("controls").before(live);
let version = data.version;

function liveRow(run) {
  const share = Math.min(run.done / run.steps, 1);
  return el("tr", {},
    el("th", { scope: "row" }, run.title), el("td", { class: "text" }, run.setting), el("td", {}, run.seed),
    el("td", {}, el("progress", { value: share, max: 1, "aria-label": `${Math.floor(100 * share)}%` })),
    el("td", {}, `${number(run.done, 0)} / ${number(run.steps, 0)} ${run.unit}`),
    el("td", {}, run.rate === null ? "" : number(run.rate, run.rate < 10 ? 1 : 0)),
    el("td", {}, run.last === null ? "" : number(run.last, 1)),
    el("td", {}, run.left === null ? "" : duration(run.left)),
    el("td", { class: "text" }, el("span", { class: `status ${run.state === "failed" ? "failed" : run.state === "finished" ? "" : "unfinished"}` },
      run.error ? `${run.state}: ${run.error}` : run.state)));
}

function drawLive(now) {
  const rows = [...now.runs].sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state)).map(liveRow);
  const heads = ["task", "setting", "seed", "progress", "steps", "steps/s", "last return", "left", "state"];
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows));
  const gpus = now.gpus.map((gpu) => `${gpu.name}: ${gpu.busy}% busy, ${number(gpu.used / 1024, 1)} of ${number(gpu.memory / 1024, 0)} GB`);
  const suites = now.suites.map((suite) => `${suite.name}: ${many(suite.runs, "run")}, ${suite.waiting} not begun`);
  live.querySelector(".lead").textContent = [...suites, ...gpus].join(" · ");
  if (now.video && movie.getAttribute("src") !== now.video.href) {
    movie.setAttribute("src", now.video.href);
    movieName.textContent = `The newest video: ${now.video.of}, ${now.video.name}`;
  }
  const shown = live.querySelector(".body");
  if (!shown.children.length) shown.append(el("div", { class: "scroll" }), el("figure", { hidden: true }, movie, movieName));
  shown.firstChild.replaceChildren(rows.length ? table : el("p", { class: "empty" }, "No run yet."));
  shown.lastChild.hidden = !now.video;
}

/** Draws new results. Where there are other systems or tasks than before, the page begins anew. */
function renew(fresh) {
  const tasksOf = (of) => JSON.stringify([of.systems.map((system) => system.name), [...new Set(of.runs.map((run) => run.panel))]]);
  if (tasksOf(fresh) !== tasksOf(data)) {
    location.reload();
    return;
  }
  Object.assign(data, fresh);
  group();
  tell();
  draw();
}

async function look() {
  try {
    const now = await (await fetch("status.json")).json();
    drawLive(now);
    if (now.version !== version) {
      renew(await (await fetch("report.json")).json());
      version = now.version;
    }
  } catch {
    live.querySelector(".lead").textContent = "drq watch does not answer: what is shown is from before.";
  }
  setTimeout(look, LOOK_EVERY);
}
look();
