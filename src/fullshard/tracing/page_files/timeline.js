// The timeline: lanes of every rank above the memory of one, on one axis of time.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const KIND_COLORS = {
  "forward": "forward", "recompute": "recompute", "backward": "backward",
  "wait for all-gather": "wait-gather", "wait for reduce-scatter": "wait-reduce",
  "copy": "copy", "reshard": "reshard", "engine": "engine", "optimizer": "optimizer",
  "outside of units": "outside", "all-gather": "gather", "reduce-scatter": "reduce",
};
const CAUSE_COLORS = ["shards", "optimizer-state", "gradients", "unsharded", "reduce-buffers", "rest"];
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

let colors = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  const names = [...Object.values(KIND_COLORS), ...CAUSE_COLORS, "ink", "soft", "line", "grid", "panel", "accent", "warn"];
  colors = Object.fromEntries(names.map((name) => [name, read(name)]));
}

function timeText(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return (us / 1e6).toPrecision(3) + " s";
  if (size >= 1e3) return (us / 1e3).toPrecision(3) + " ms";
  return us.toFixed(size < 10 ? 1 : 0) + " µs";
}
function bytesText(bytes) {
  let size = bytes;
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (size < 1000) return (size >= 100 || unit === "bytes" ? size.toFixed(0) : size.toPrecision(3)) + " " + unit;
    size /= 1024;
  }
  return size.toPrecision(3) + " TiB";
}
const unitName = (unit) => (typeof unit === "number" ? data.units[unit] : unit);

const LANES = { compute: 26, gather: 15, reduce: 15 };
const AXIS = 26, RANK_GAP = 14, RANK_TITLE = 18, MEMORY = 130, LEFT = 4, RIGHT = 4;

const timeline = {
  canvas: document.querySelector("#timeline canvas"),
  begin: 0, end: 1, low: 0, high: 1,
  memoryOf: 0, wanted: "",

  start() {
    const bounds = data.ranks.flatMap((rank) => rank.steps.flat());
    this.low = Math.min(...bounds);
    this.high = Math.max(...bounds);
    const steps = data.ranks[0].steps;
    // One step fills the picture at first: the last, which is as usual as steps get.
    [this.begin, this.end] = steps[steps.length - 1] || [0, 1];
    const slow = data.straggler && data.ranks.findIndex((rank) => rank.rank === data.straggler.rank);
    this.memoryOf = slow > 0 ? slow : 0;
    this.makeControls();
    this.makeLegend();
    listen(this);
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); this.draw(); });
  },

  rankHeight() { return RANK_TITLE + LANES.compute + LANES.gather + LANES.reduce + 4; },
  memoryTop() { return AXIS + data.ranks.length * (this.rankHeight() + RANK_GAP) + RANK_TITLE; },
  hasMemory() { return data.ranks[this.memoryOf].memory.length > 0; },
  height() { return this.hasMemory() ? this.memoryTop() + MEMORY + 6 : this.memoryTop() - RANK_TITLE; },

  x(us) { return LEFT + (us - this.begin) / (this.end - this.begin) * (this.width - LEFT - RIGHT); },
  at(x) { return this.begin + (x - LEFT) / (this.width - LEFT - RIGHT) * (this.end - this.begin); },

  show(begin, end) {
    const least = 2, most = (this.high - this.low) * 1.04;
    let length = Math.min(Math.max(end - begin, least), most);
    begin = Math.min(Math.max(begin, this.low - most * 0.02), this.high + most * 0.02 - length);
    this.begin = begin;
    this.end = begin + length;
    this.markButtons();
    this.draw();
  },
  zoom(factor, around = (this.begin + this.end) / 2) {
    this.show(around - (around - this.begin) * factor, around + (this.end - around) * factor);
  },
  move(us) { this.show(this.begin + us, this.end + us); },

  draw() {
    const scale = window.devicePixelRatio || 1;
    this.width = this.canvas.parentElement.clientWidth;
    const height = this.height();
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = height + "px";
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = FONT;
    pen.textBaseline = "middle";
    pen.clearRect(0, 0, this.width, height);
    this.boxes = [];
    this.drawAxis(pen, height);
    data.ranks.forEach((rank, number) => this.drawRank(pen, rank, number));
    if (this.hasMemory()) this.drawMemory(pen, data.ranks[this.memoryOf]);
  },

  drawAxis(pen, height) {
    const span = this.end - this.begin;
    const rough = span / Math.max(2, Math.floor(this.width / 110));
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const zero = data.ranks[0].steps.find(([b, e]) => this.begin < e)?.[0] ?? this.low;
    pen.strokeStyle = colors.grid;
    pen.fillStyle = colors.soft;
    pen.lineWidth = 1;
    const first = Math.ceil((this.begin - zero) / every);
    for (let n = first; zero + n * every <= this.end; n++) {
      const x = Math.round(this.x(zero + n * every)) + 0.5;
      pen.beginPath(); pen.moveTo(x, AXIS - 6); pen.lineTo(x, height); pen.stroke();
      const label = n === 0 ? "0" : timeText(n * every);
      const width = pen.measureText(label).width;
      pen.fillText(label, Math.min(Math.max(x - width / 2, 2), this.width - width - 2), 10);
    }
    pen.strokeStyle = colors.soft;
    pen.setLineDash([4, 4]);
    for (const [begin] of data.ranks[0].steps.slice(1)) {
      const x = Math.round(this.x(begin)) + 0.5;
      if (x > 0 && x < this.width) { pen.beginPath(); pen.moveTo(x, AXIS - 6); pen.lineTo(x, height); pen.stroke(); }
    }
    pen.setLineDash([]);
  },

  drawRank(pen, rank, number) {
    let top = AXIS + number * (this.rankHeight() + RANK_GAP);
    const isSlow = data.straggler && data.straggler.rank === rank.rank;
    pen.fillStyle = isSlow ? colors.warn : colors.ink;
    pen.font = "600 " + FONT;
    const title = (data.isForetold ? "each rank" : "rank " + rank.rank) + (isSlow ? ": the others wait for it" : "");
    pen.fillText(title, LEFT, top + RANK_TITLE / 2);
    pen.font = FONT;
    top += RANK_TITLE;
    for (const [kind, unit, begin, end] of rank.compute) {
      this.box(pen, { kind, unit, begin, end, rank }, top, LANES.compute);
    }
    top += LANES.compute + 2;
    for (const [kind, unit, issued, begin, end, bytes] of rank.collectives) {
      const isReduce = data.kinds[kind] === "reduce-scatter";
      this.box(pen, { kind, unit, begin, end, issued, bytes, rank }, top + (isReduce ? LANES.gather + 1 : 0), LANES.gather);
    }
  },

  box(pen, item, top, height) {
    const left = this.x(item.begin), right = this.x(item.end);
    if (right < 0 || left > this.width) return;
    const kind = data.kinds[item.kind], name = unitName(item.unit);
    const faded = this.wanted && !name.includes(this.wanted);
    const width = Math.max(right - left, 0.6);
    pen.globalAlpha = faded ? 0.18 : 1;
    pen.fillStyle = colors[KIND_COLORS[kind]];
    pen.fillRect(left, top, width > 3 ? width - 0.6 : width, height);
    if (width > 16) {
      const dark = ["outside of units", "engine", "reshard", "recompute"].includes(kind);
      pen.fillStyle = dark ? colors.ink : "#fff";
      const from = Math.max(left, 0) + 5, room = Math.min(right, this.width) - from - 4;
      pen.fillText(clipped(pen, labelOf(kind, name), room), from, top + height / 2 + 0.5);
    }
    pen.globalAlpha = 1;
    this.boxes.push({ item, left, right: left + width, top, bottom: top + height });
  },

  drawMemory(pen, rank) {
    const top = this.memoryTop(), moments = rank.memory;
    const total = (moment) => moment.slice(1).reduce((sum, size) => sum + size, 0);
    const visible = moments.filter((m) => m[0] >= this.begin && m[0] <= this.end);
    const largest = Math.max(...(visible.length ? visible : moments).map(total), 1);
    const bottom = top + MEMORY, y = (bytes) => bottom - bytes / (largest * 1.06) * MEMORY;
    pen.fillStyle = colors.ink;
    pen.font = "600 " + FONT;
    const who = data.isForetold ? "each rank" : "rank " + rank.rank;
    pen.fillText(`memory of ${who}: up to ${bytesText(largest)}`, LEFT, top - RANK_TITLE / 2);
    pen.font = FONT;
    let floor = moments.map(() => 0);
    data.causes.forEach((_, cause) => {
      const ceiling = moments.map((moment, n) => floor[n] + moment[cause + 1]);
      pen.fillStyle = colors[CAUSE_COLORS[cause]];
      pen.beginPath();
      this.outline(pen, moments, ceiling, y, false);
      this.outline(pen, moments, floor, y, true);
      pen.closePath();
      pen.fill();
      floor = ceiling;
    });
  },
  // Memory stays what it was until the next moment that is known.
  outline(pen, moments, levels, y, isBackward) {
    const order = moments.map((_, n) => n);
    if (isBackward) order.reverse();
    for (const n of order) {
      const here = this.x(moments[n][0]), next = this.x(n + 1 < moments.length ? moments[n + 1][0] : this.high);
      const [first, second] = isBackward ? [next, here] : [here, next];
      pen.lineTo(first, y(levels[n]));
      pen.lineTo(second, y(levels[n]));
    }
  },

  find(x, y) {
    for (let n = this.boxes.length - 1; n >= 0; n--) {
      const box = this.boxes[n];
      if (y >= box.top && y < box.bottom && x >= box.left - 1 && x <= box.right + 1) return box.item;
    }
    const top = this.memoryTop();
    if (this.hasMemory() && y >= top && y <= top + MEMORY) {
      const moments = data.ranks[this.memoryOf].memory, at = this.at(x);
      let found = null;
      for (const moment of moments) { if (moment[0] > at) break; found = moment; }
      return found && { moment: found };
    }
    return null;
  },

  makeControls() {
    const controls = byId("controls");
    const add = (text, label, act) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-label", label);
      button.addEventListener("click", act);
      controls.append(button);
      return button;
    };
    const steps = data.ranks[0].steps;
    this.stepButtons = [];
    if (steps.length > 1) {
      const all = add("all", "Show all steps", () => this.show(this.low, this.high));
      this.stepButtons.push([all, this.low, this.high]);
      steps.slice(0, 12).forEach(([begin, end], n) => {
        this.stepButtons.push([add("step " + (n + 1), "Show step " + (n + 1), () => this.show(begin, end)), begin, end]);
      });
    } else {
      add("all", "Show everything", () => this.show(this.low, this.high));
    }
    add("−", "Zoom out", () => this.zoom(1.6)).id = "zoom-out";
    add("+", "Zoom in", () => this.zoom(1 / 1.6)).id = "zoom-in";
    if (data.ranks.length > 1 && this.hasMemory()) {
      const select = document.createElement("select");
      select.setAttribute("aria-label", "Whose memory to show");
      data.ranks.forEach((rank, n) => select.add(new Option("memory of rank " + rank.rank, n)));
      select.value = this.memoryOf;
      select.addEventListener("change", () => { this.memoryOf = Number(select.value); this.draw(); });
      controls.append(select);
    }
    const search = document.createElement("input");
    search.type = "search";
    search.placeholder = "find a unit";
    search.setAttribute("aria-label", "Find a unit by its name");
    search.addEventListener("input", () => { this.want(search.value); });
    controls.append(search);
    this.search = search;
    byId("hint").textContent = "Drag to move, Ctrl + scroll or pinch to zoom, hover or tap for details, click a unit to see it alone.";
    this.markButtons();
  },
  markButtons() {
    for (const [button, begin, end] of this.stepButtons || []) {
      const shown = Math.abs(this.begin - begin) + Math.abs(this.end - end) < (end - begin) * 0.01;
      button.setAttribute("aria-pressed", String(shown));
    }
  },
  want(text) {
    this.wanted = text;
    if (this.search.value !== text) this.search.value = text;
    this.draw();
  },

  makeLegend() {
    const used = new Set(data.ranks.flatMap((rank) => [...rank.compute, ...rank.collectives].map((item) => item[0])));
    const add = (name, color) => {
      const entry = document.createElement("span"), swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = `var(--${color})`;
      entry.append(swatch, name);
      byId("legend").append(entry);
    };
    data.kinds.forEach((kind, n) => { if (used.has(n)) add(kind, KIND_COLORS[kind]); });
    if (this.hasMemory()) data.causes.forEach((cause, n) => add(cause, CAUSE_COLORS[n]));
  },
};

function labelOf(kind, name) {
  if (kind === "outside of units" || kind === "all-gather" || kind === "reduce-scatter") return name;
  return name ? name : kind;
}
// The name, or as many of its last parts as there is room for.
function clipped(pen, text, room) {
  const parts = text.includes(" ") ? [text] : text.split(".");
  for (let n = 0; n < parts.length; n++) {
    const rest = parts.slice(n).join(".");
    if (pen.measureText(rest).width <= room) return rest;
  }
  return "";
}

// -- hovering and moving ------------------------------------------------------------------------

function describe(found) {
  const lines = [];
  if (found.moment) {
    const sizes = found.moment.slice(1);
    lines.push("memory " + bytesText(sizes.reduce((sum, size) => sum + size, 0)));
    data.causes.forEach((cause, n) => { if (sizes[n]) lines.push(`${cause}: ${bytesText(sizes[n])}`); });
    return lines;
  }
  const kind = data.kinds[found.kind], name = unitName(found.unit);
  lines.push(kind === "outside of units" ? `${name} (the program itself)` : `${kind}${name ? " of " + name : ""}`);
  lines.push(timeText(found.end - found.begin) + (data.isForetold ? "" : ` on rank ${found.rank.rank}`));
  if (found.bytes) {
    const seconds = (found.end - found.begin) / 1e6;
    lines.push(`${bytesText(found.bytes)}` + (seconds > 0 ? `, ${(found.bytes / seconds / 1e9).toPrecision(3)} GB/s` : ""));
  }
  if (found.issued !== undefined && found.begin - found.issued > 1) lines.push(`issued ${timeText(found.begin - found.issued)} before it ran`);
  return lines;
}

function showTooltip(found, x, y) {
  const tooltip = byId("tooltip");
  tooltip.hidden = !found;
  if (!found) return;
  const [first, ...others] = describe(found), title = document.createElement("b");
  title.textContent = first;
  tooltip.replaceChildren(title, ...others.flatMap((line, n) => (n ? [document.createElement("br"), line] : [line])));
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = Math.max(6, Math.min(x + 14, innerWidth - width - 6)) + "px";
  tooltip.style.top = (y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18) + "px";
}

function listen(timeline) {
  const canvas = timeline.canvas, pointers = new Map();
  let moved = false;
  const perPixel = () => (timeline.end - timeline.begin) / timeline.width;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
    moved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (!pointers.has(event.pointerId)) { showTooltip(timeline.find(x, y), event.clientX, event.clientY); return; }
    const before = [...pointers.values()];
    const step = event.clientX - pointers.get(event.pointerId);
    if (pointers.size === 1 && Math.abs(step) < 4 && !moved) return;
    moved = true;
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 1) timeline.move(-step * perPixel());
    else if (pointers.size === 2) {
      const after = [...pointers.values()], box = canvas.getBoundingClientRect();
      const spread = (pair) => Math.max(Math.abs(pair[0] - pair[1]), 10);
      timeline.zoom(spread(before) / spread(after), timeline.at((after[0] + after[1]) / 2 - box.left));
    }
    showTooltip(null);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", (event) => {
    release(event);
    if (moved) return;
    const found = timeline.find(...at(event));
    if (event.pointerType !== "mouse") { showTooltip(found, event.clientX, event.clientY); return; }
    const name = found && typeof found.unit === "number" ? unitName(found.unit) : "";
    timeline.want(name === timeline.wanted ? "" : name);
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => showTooltip(null));
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (event.ctrlKey || event.metaKey) timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), timeline.at(at(event)[0]));
    else if (sideways) timeline.move(sideways * perPixel());
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const tenth = (timeline.end - timeline.begin) / 10;
    const acts = {
      ArrowLeft: () => timeline.move(-tenth), ArrowRight: () => timeline.move(tenth),
      ArrowUp: () => timeline.zoom(0.8), ArrowDown: () => timeline.zoom(1.25),
      "+": () => timeline.zoom(0.8), "-": () => timeline.zoom(1.25),
      Home: () => timeline.show(timeline.low, timeline.high), Escape: () => timeline.want(""),
    };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
  });
}
