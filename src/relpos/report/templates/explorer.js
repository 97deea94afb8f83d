"use strict";
// Draws the data of the chosen mechanism, tokens, head and query. Nothing is loaded.
const entries = JSON.parse(document.getElementById("data").textContent);
const byName = new Map(entries.map((entry) => [entry.name, entry]));
const at = (id) => document.getElementById(id);
const system = matchMedia("(prefers-color-scheme: dark)"), dark = { matches: system.matches };
const inDark = [...document.styleSheets].filter((sheet) => sheet.ownerNode.nodeName === "STYLE").flatMap((sheet) => [...sheet.cssRules]).filter((rule) => /color-scheme/.test(rule.media?.mediaText));
const HUES = ["#c2570c", "#0f6cbf", "#11826b", "#7a1f9e"], HUES_DARK = ["#f59a55", "#6cb2f5", "#4fcbad", "#d3a0f7"];

const wants = () => ({
  name: at("mechanism").value, tokens: at("tokens").value, size: +at("size").value, query: +at("query").value,
  head: +at("head").value, weights: at("weights").value, strength: +at("strength").value, causal: at("causal").checked,
});

function stored(state) {
  const states = byName.get(state.name)[state.tokens];
  return states[state.weights] || states.start;
}

// The numbers of a head for all pairs: change(query, key), null if the key is masked.
function scores(state) {
  const data = stored(state), n = state.size, grid = state.tokens === "grid";
  const count = grid ? n * n : n, strengths = data.offsets || data.pairs[n];
  const heads = strengths[Math.min(state.strength, strengths.length - 1)];
  const change = (head, i, j) => {
    const row = heads[Math.min(head, heads.length - 1)];
    if (state.causal && !grid && j > i) return null;
    if (!data.offsets) { const x = row[i * count + j]; return x === null ? null : x / 1000; }
    if (!grid) { const low = (row.length - 1) / 2; return row[low + i - j] / 1000; }
    const span = Math.round(Math.sqrt(row.length)), low = (span - 1) / 2;
    const dr = Math.floor(i / n) - Math.floor(j / n), dc = (i % n) - (j % n);
    return row[(low + dr) * span + low + dc] / 1000;
  };
  return { change, count, heads: heads.length, grid, n };
}

function attention(of, head, query) {
  const row = Array.from({ length: of.count }, (_, key) => of.change(head, query, key));
  const top = Math.max(...row.filter((x) => x !== null));
  const powers = row.map((x) => (x === null ? 0 : Math.exp(x - top))), total = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / total);
}

function mixed(from, to, share) { return from.map((x, i) => Math.round(x + (to[i] - x) * share)); }
function colour(value, limit) { // orange attracts, purple repels
  const ground = dark.matches ? [35, 40, 45] : [247, 245, 242];
  if (value === null) return dark.matches ? [20, 23, 26] : [214, 210, 204];
  const share = limit ? Math.min(1, Math.abs(value) / limit) : 0;
  const end = value > 0 ? (dark.matches ? [255, 160, 80] : [194, 87, 12]) : (dark.matches ? [170, 140, 255] : [76, 48, 158]);
  return mixed(ground, end, share);
}

// A canvas of rows x columns cells; `marked` cells get an outline.
function paint(canvas, rows, columns, cell, marked = []) {
  const scale = Math.max(1, Math.ceil(460 / Math.max(rows, columns)));
  canvas.width = columns * scale; canvas.height = rows * (rows > 100 ? 2 : scale);
  const tall = canvas.height / rows;
  const context = canvas.getContext("2d");
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    context.fillStyle = `rgb(${cell(r, c).join(",")})`;
    context.fillRect(c * scale, r * tall, scale, tall);
  }
  context.strokeStyle = dark.matches ? "#e4e7ea" : "#1f2428"; context.lineWidth = Math.max(1.5, scale / 12);
  for (const [r, c, height, width] of marked) context.strokeRect(c * scale + 1, r * tall + 1, width * scale - 2, height * tall - 2);
}

const signed = (x) => {
  if (x === null) return "hidden";
  const size = Math.abs(x).toFixed(2);
  return `${+size === 0 ? "" : x < 0 ? "\u2212" : "+"}${size}`;
};
const plain = (x) => `${x < 0 ? "\u2212" : ""}${Math.abs(x)}`;
const placed = (of, token) => (of.grid ? `(${Math.floor(token / of.n)}, ${token % of.n})` : `${token}`);

function drawMap(state, of) {
  let limit = 0;
  const all = [];
  if (of.grid) for (let j = 0; j < of.count; j++) all.push(of.change(state.head, state.query, j));
  else for (let i = 0; i < of.n; i++) for (let j = 0; j < of.n; j++) all.push(of.change(state.head, i, j));
  for (const x of all) if (x !== null) limit = Math.max(limit, Math.abs(x));
  const width = of.n, query = state.query;
  const marked = of.grid ? [[Math.floor(query / width), query % width, 1, 1]] : [[query, 0, 1, width]];
  paint(at("map"), of.n, of.n, (r, c) => colour(all[r * width + c], limit), marked);
  const what = of.grid ? `keys of query ${placed(of, query)}, outlined` : "queries (down) and keys (across); the query is outlined";
  at("map-caption").textContent = `The change of the score by position, head ${state.head}: ${what}. Full colour is ${limit.toFixed(2)}. Click, or move with the arrow keys, to choose a query.`;
  at("map").setAttribute("aria-label", `heat map of scores, ${of.n} by ${of.n}, largest change ${limit.toFixed(2)}`);
}

function drawCurve(state, of) {
  const series = [], query = state.query, n = of.n;
  for (let head = 0; head < of.heads; head++) {
    const points = [];
    if (of.grid) {
      const row = Math.floor(query / n);
      for (let c = 0; c < n; c++) points.push([(query % n) - c, of.change(head, query, row * n + c)]);
    } else if (stored(state).offsets) {
      for (let d = 1 - n; d < n; d++) points.push([d, of.change(head, Math.max(0, d), Math.max(0, -d))]);
    } else for (let j = 0; j < n; j++) points.push([query - j, of.change(head, query, j)]);
    series.push(points.filter((p) => p[1] !== null).sort((a, b) => a[0] - b[0]));
  }
  const xs = series.flat().map((p) => p[0]), ys = series.flat().map((p) => p[1]).concat([0]);
  const low = Math.min(...xs), high = Math.max(...xs, low + 1), bottom = Math.min(...ys), top = Math.max(...ys, bottom + 1e-3);
  const narrow = at("curve").clientWidth < 260, W = narrow ? 230 : 460, H = narrow ? 230 : 300, L = narrow ? 38 : 44, B = 30, T = 12, R = 12;
  const x = (v) => L + ((v - low) / (high - low)) * (W - L - R), y = (v) => T + ((top - v) / (top - bottom)) * (H - T - B);
  const hues = dark.matches ? HUES_DARK : HUES;
  const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
  const lines = series.map((points, head) => `<path class="${head === Math.min(state.head, of.heads - 1) ? "chosen" : ""}" stroke="${hues[head % hues.length]}" d="${path(points)}"/>`);
  const ticks = [low, Math.round((low + high) / 2), high].map((v) => `<text x="${x(v)}" y="${H - 12}" text-anchor="middle">${plain(v)}</text>`);
  const levels = [bottom, top].concat(bottom < 0 && top > 0 ? [0] : []).map((v) => `<text x="${L - 6}" y="${y(v) + 4}" text-anchor="end">${v ? plain(+v.toFixed(2)) : 0}</text>`);
  const zero = `<line class="axis" x1="${L}" x2="${W - R}" y1="${y(0)}" y2="${y(0)}"/>`;
  const here = low <= 0 && high >= 0 ? `<line class="here" x1="${x(0)}" x2="${x(0)}" y1="${T}" y2="${H - B}"/>` : "";
  at("curve").innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="change of the score over the offset">${zero}${here}${lines.join("")}${ticks.join("")}${levels.join("")}</svg>`;
  const along = of.grid ? "column offset in the query's row" : "offset = query \u2212 key";
  const heads = of.heads > 1 ? `${of.heads} heads, the chosen one thicker` : "the same for every head";
  at("curve-caption").textContent = `The same over the ${along}: ${heads}.`;
}

function drawAttention(state, of) {
  const weights = attention(of, state.head, state.query), top = Math.max(...weights);
  const canvas = at("attention"), ground = dark.matches ? [35, 40, 45] : [247, 245, 242];
  const ink = dark.matches ? [124, 184, 245] : [11, 92, 173], flat = 1 / weights.filter((x) => x > 0).length;
  if (of.grid) {
    const spot = [[Math.floor(state.query / of.n), state.query % of.n, 1, 1]];
    paint(canvas, of.n, of.n, (r, c) => mixed(ground, ink, weights[r * of.n + c] / top), spot);
  } else {
    const tall = 200; // bars, with a line at their height without position
    const line = tall - Math.round((flat / top) * tall), red = dark.matches ? [255, 160, 80] : [194, 87, 12];
    const bar = (r, c) => (r === line ? red : tall - r <= Math.round((weights[c] / top) * tall) ? (c === state.query ? mixed(ink, red, 0.5) : ink) : ground);
    paint(canvas, tall, of.n, bar);
  }
  canvas.style.aspectRatio = of.grid ? "1" : "1.5";
  const text = `Attention of query ${placed(of, state.query)} to equal keys, head ${state.head}. The largest is ${top.toFixed(3)}; without a position all would be ${flat.toFixed(3)}${of.grid ? "" : " (the line)"}.`;
  at("attention-caption").textContent = text;
  canvas.setAttribute("aria-label", text);
}

function drawCosine(state) {
  const rows = stored(state).cosine;
  at("turning").hidden = !rows;
  if (!rows) return;
  const row = rows[Math.min(state.head, rows.length - 1)], pairs = byName.get(state.name).turns[state.tokens], count = row.length / pairs;
  paint(at("cosine"), pairs, count, (r, c) => colour(row[r * count + c] / 1000, 1));
  at("cosine").style.aspectRatio = `${count} / ${Math.max(pairs, count / 3)}`;
  at("cosine-caption").textContent = `The rotation: cosine of the angle by which each of ${pairs} pairs of dimensions (down) turns at the first ${count} ${state.tokens === "grid" ? "tokens in raster order" : "positions"} (across).`;
  at("cosine").setAttribute("aria-label", at("cosine-caption").textContent);
}

function read(state, of, key) {
  const change = of.change(state.head, state.query, key), weight = attention(of, state.head, state.query)[key];
  const offset = of.grid
    ? `(${plain(Math.floor(state.query / of.n) - Math.floor(key / of.n))}, ${plain((state.query % of.n) - (key % of.n))})`
    : plain(state.query - key);
  at("readout").textContent = `Query ${placed(of, state.query)}, key ${placed(of, key)}, offset ${offset}: score ${signed(change)}, attention ${weight.toFixed(3)}.`;
}

let lastKey = 0;
function draw() {
  const state = wants(), of = scores(state);
  at("query-shown").textContent = placed(of, state.query);
  at("size-shown").textContent = of.grid ? `${of.n} x ${of.n}` : `${of.n}`;
  drawMap(state, of); drawCurve(state, of); drawAttention(state, of); drawCosine(state);
  read(state, of, Math.min(lastKey, of.count - 1));
  const known = new URLSearchParams({ ...state, causal: state.causal ? 1 : 0 });
  history.replaceState(null, "", `#${known}`);
}

// The choices follow from the data.
function fit(keepSize, keepQuery) {
  const entry = byName.get(at("mechanism").value), tokens = at("tokens");
  for (const option of tokens.options) option.disabled = !entry[option.value];
  if (!entry[tokens.value]) tokens.value = entry.sequence ? "sequence" : "grid";
  const states = entry[tokens.value], weights = at("weights");
  weights.parentElement.hidden = !states.trained;
  if (!states.trained) weights.value = "start";
  const data = stored(wants()), grid = tokens.value === "grid", size = at("size"), before = +size.value;
  const sizes = data.offsets ? null : Object.keys(data.pairs).map(Number);
  size.min = sizes ? sizes[0] : grid ? 3 : 8; size.max = sizes ? sizes[sizes.length - 1] : data.most;
  size.step = sizes && sizes.length > 1 ? sizes[1] - sizes[0] : 1;
  const fits = sizes ? sizes.includes(before) : before >= +size.min && before <= +size.max;
  size.value = keepSize && fits ? before : sizes ? sizes[0] : grid ? 8 : 32;
  at("size-name").textContent = grid ? "Rows and columns" : "Length";
  const of = scores({ ...wants(), head: 0 }), query = at("query"), head = at("head"), chosen = Math.min(+head.value || 0, of.heads - 1);
  query.max = of.count - 1;
  if (!keepQuery) query.value = grid ? Math.floor(of.n / 2) * of.n + Math.floor(of.n / 2) : Math.floor(of.count / 2);
  head.replaceChildren(...Array.from({ length: of.heads }, (_, i) => new Option(of.heads > 1 ? `${i}` : "all are equal", i)));
  head.value = chosen;
  const strengths = (data.offsets || data.pairs[size.value]).length;
  at("strength").parentElement.hidden = strengths < 2;
  const hides = scores({ ...wants(), head: 0, causal: false }).change(0, 0, of.count - 1) === null;
  at("causal").parentElement.hidden = grid || hides;
  at("title").textContent = entry.title; at("summary").textContent = entry.summary; at("source").textContent = `Source: ${entry.source}.`;
  const remarks = [];
  if (entry.added) remarks.push("Its vectors are added to tokens. The picture shows the similarity of two positions' vectors, which attention can learn to use.");
  if (entry.values) remarks.push("It also adds vectors to values, which scores do not show.");
  if (hides) remarks.push("It is defined for keys up to the query; later keys are masked (grey).");
  if (entry.turns.sequence && !grid && entry.family === "rotation") remarks.push("Drawn at four times the trained length, since some rotations change only beyond it.");
  if (entry.learns && !states.trained) remarks.push("Its learned values are random initial ones.");
  if (weights.value === "trained") remarks.push(grid
    ? "Trained briefly on handwritten digits: an example, not a result."
    : "Trained briefly on English text under a causal mask: an example, not a result. Later keys were masked: their values mean nothing.");
  at("remark").textContent = remarks.join(" ");
}

function cellAt(canvas, event, rows, columns) {
  const box = canvas.getBoundingClientRect();
  const r = Math.floor(((event.clientY - box.top) / box.height) * rows), c = Math.floor(((event.clientX - box.left) / box.width) * columns);
  return [Math.max(0, Math.min(rows - 1, r)), Math.max(0, Math.min(columns - 1, c))];
}
at("map").addEventListener("click", (event) => {
  const of = scores(wants()), [r, c] = cellAt(at("map"), event, of.n, of.n);
  at("query").value = of.grid ? r * of.n + c : r;
  draw();
});
at("map").addEventListener("mousemove", (event) => {
  const state = wants(), of = scores(state), [r, c] = cellAt(at("map"), event, of.n, of.n);
  lastKey = of.grid ? r * of.n + c : c;
  read(of.grid ? state : { ...state, query: r }, of, lastKey);
});
at("map").addEventListener("keydown", (event) => {
  const of = scores(wants()), down = of.grid ? of.n : 1;
  const step = { ArrowUp: -down, ArrowDown: down, ArrowLeft: of.grid ? -1 : 0, ArrowRight: of.grid ? 1 : 0 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = +at("query").value + step;
  if (next >= 0 && next < of.count) at("query").value = next;
  draw();
});
at("controls").addEventListener("input", (event) => {
  const changed = event.target.id;
  if (!["query", "head", "causal", "strength"].includes(changed)) fit(changed !== "tokens", changed === "weights");
  draw();
});
at("controls").addEventListener("submit", (event) => event.preventDefault());
// Light or dark as in the system, or as set by an enclosing page with its own switch.
function shade(is) {
  dark.matches = is;
  inDark.forEach((rule) => { rule.media.mediaText = is ? "all" : "not all"; });
  document.documentElement.style.colorScheme = is ? "dark" : "light";
  draw();
}
system.addEventListener("change", (event) => shade(event.matches));
addEventListener("message", (event) => { if (typeof event.data?.dark === "boolean") shade(event.data.dark); });

function start() {
  const known = new URLSearchParams(location.hash.slice(1));
  if (byName.has(known.get("name"))) at("mechanism").value = known.get("name");
  if (known.get("tokens")) at("tokens").value = known.get("tokens");
  at("weights").value = "start";
  fit(false, false);
  if (known.get("weights") === "trained" && !at("weights").parentElement.hidden) { at("weights").value = "trained"; fit(false, false); }
  for (const id of ["size", "query", "head", "strength"]) if (known.get(id)) { at(id).value = known.get(id); if (id === "size") fit(true, false); }
  at("causal").checked = known.get("causal") === "1";
  draw();
}
addEventListener("hashchange", () => { start(); });
start();
