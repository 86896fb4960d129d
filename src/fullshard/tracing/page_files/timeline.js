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
const FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const FONT = "12px " + FAMILY, SMALL_FONT = "10.5px " + FAMILY;

let colors = {}, wordColors = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  const names = [...Object.values(KIND_COLORS), ...CAUSE_COLORS, "ink", "soft", "line", "grid", "panel", "accent", "warn"];
  colors = Object.fromEntries(names.map((name) => [name, read(name)]));
  wordColors = Object.fromEntries(names.map((name) => [name, isBright(colors[name]) ? "#101820" : "#ffffff"]));
}
// Whether dark words are easier to read on a color than white ones, by its luminance (WCAG).
function isBright(hex) {
  const [red, green, blue] = [1, 3, 5].map((n) => {
    const part = parseInt(hex.slice(n, n + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18;
}

function timeText(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return (us / 1e6).toPrecision(3) + " s";
  if (size >= 1e3) return (us / 1e3).toPrecision(3) + " ms";
  return us.toFixed(size < 10 ? 1 : 0) + " µs";
}
// A round number of an axis, without zeros behind the point.
const tickText = (text) => text.replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
function bytesText(bytes) {
  let size = bytes;
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (size < 1000) return (size >= 100 || unit === "bytes" ? size.toFixed(0) : size.toPrecision(3)) + " " + unit;
    size /= 1024;
  }
  return size.toPrecision(3) + " TiB";
}
const nameOf = (rank) => {
  if (data.isForetold) return "each rank";
  const isAlone = data.summaries.every(({ host }) => host === rank.host);
  return "rank " + rank.rank + (isAlone ? "" : ` (${rank.host.split(" ")[0]})`);
};
const unitName = (unit) => (typeof unit === "number" ? data.units[unit] : unit);

const COMPUTE_LANE = 26, LANE = 15;
// Collectives that are under way at the same time are in rows of a lane, up to so many.
const ROW = 10, MOST_ROWS_OF_A_LANE = 6;
const AXIS = 26, RANK_GAP = 14, RANK_TITLE = 18, MEMORY = 130, RIGHT = 4;
// What is drawn of very many things: those narrower than this share a pixel with their neighbour.
const NARROW = 0.6;
// Of ordered items, the first whose end is not before a moment.
function firstReaching(items, moment, endOf) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(items[middle]) < moment) low = middle + 1; else high = middle;
  }
  return low;
}
const totalOf = (moment) => moment.slice(1).reduce((sum, size) => sum + size, 0);

const timeline = {
  canvas: document.querySelector("#timeline canvas"),
  begin: 0, end: 1, low: 0, high: 1,
  memoryOf: 0, wanted: "", isExact: false,

  start() {
    const first = data.ranks.map((rank) => rank.steps[0]).filter(Boolean), last = data.ranks.map((rank) => rank.steps.at(-1)).filter(Boolean);
    this.low = Math.min(...first.map(([begin]) => begin));
    this.high = Math.max(...last.map(([, end]) => end));
    const steps = data.ranks[0].steps;
    // One step fills the picture at first: the last, which is as usual as steps get.
    [this.begin, this.end] = steps[steps.length - 1] || [0, 1];
    const slow = data.straggler && data.ranks.findIndex((rank) => rank.rank === data.straggler.rank);
    this.memoryOf = slow > 0 ? slow : 0;
    this.rows = Object.fromEntries(["all-gather", "reduce-scatter"].map((kind) => [kind, this.rowsOf(kind)]));
    this.makeControls();
    this.makeLegend();
    listen(this);
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); this.draw(); });
  },

  // How many rows the lane of a kind of collective has, on all ranks.
  rowsOf(kind) {
    const rows = data.ranks.map((rank) => rank.collectives.reduce((most, item) => (data.kinds[item[0]] === kind ? Math.max(most, item[6] + 1) : most), 1));
    return Math.min(Math.max(...rows), MOST_ROWS_OF_A_LANE);
  },
  laneHeight(kind) { return this.rows[kind] === 1 ? LANE : this.rows[kind] * ROW; },
  rankHeight() { return RANK_TITLE + COMPUTE_LANE + this.laneHeight("all-gather") + this.laneHeight("reduce-scatter") + 4; },
  memoryTop() { return AXIS + data.ranks.length * (this.rankHeight() + RANK_GAP) + RANK_TITLE; },
  hasMemory() { return data.ranks[this.memoryOf].memory.length > 0; },
  height() { return this.hasMemory() ? this.memoryTop() + MEMORY + 6 : this.memoryTop() - RANK_TITLE; },

  // The names of the lanes stand to the left of the plot.
  get isNarrow() { return this.width < 640; },
  get left() { return this.isNarrow ? 82 : 104; },
  get plotWidth() { return this.width - this.left - RIGHT; },
  get perPixel() { return (this.end - this.begin) / this.plotWidth; },
  x(us) { return this.left + (us - this.begin) / this.perPixel; },
  at(x) { return this.begin + (x - this.left) * this.perPixel; },

  show(begin, end) {
    const least = 2, most = (this.high - this.low) * 1.04;
    let length = Math.min(Math.max(end - begin, least), most);
    begin = Math.min(Math.max(begin, this.low - most * 0.02), this.high + most * 0.02 - length);
    this.begin = begin;
    this.end = begin + length;
    this.markStep();
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
  // What is drawn inside stays in the plot.
  inPlot(pen, top, height, draw) {
    pen.save();
    pen.beginPath();
    pen.rect(this.left, top, this.plotWidth, height);
    pen.clip();
    draw();
    pen.restore();
  },
  // The beginning of the step in which a moment of the first rank lies.
  stepBegin(moment) {
    const steps = data.ranks[0].steps;
    return (steps.find(([, end]) => moment < end) || steps.at(-1) || [this.low])[0];
  },

  drawAxis(pen, height) {
    const rough = (this.end - this.begin) / Math.max(2, Math.floor(this.plotWidth / (this.isNarrow ? 70 : 110)));
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const zero = this.stepBegin(this.begin);
    const upright = (x) => { pen.beginPath(); pen.moveTo(x, AXIS - 6); pen.lineTo(x, height); pen.stroke(); };
    pen.strokeStyle = colors.grid;
    pen.fillStyle = colors.soft;
    pen.lineWidth = 1;
    for (let n = Math.ceil((this.begin - zero) / every - 1e-6); zero + n * every <= this.end; n++) {
      const x = Math.round(this.x(zero + n * every)) + 0.5;
      upright(x);
      const label = n === 0 ? "0" : tickText(timeText(n * every)), width = pen.measureText(label).width;
      pen.fillText(label, Math.min(Math.max(x - width / 2, this.left - 4), this.width - width - 2), 10);
    }
    pen.strokeStyle = colors.soft;
    pen.setLineDash([4, 4]);
    for (const [begin] of data.ranks[0].steps.slice(1)) {
      const x = Math.round(this.x(begin)) + 0.5;
      if (x > this.left && x < this.width) upright(x);
    }
    pen.setLineDash([]);
  },

  title(pen, text, y, color = colors.ink) {
    pen.font = "600 " + FONT;
    // Lines of the axis end around the words.
    pen.fillStyle = colors.panel;
    pen.fillRect(0, y - RANK_TITLE / 2, pen.measureText(text).width + 8, RANK_TITLE);
    pen.fillStyle = color;
    pen.fillText(text, 4, y);
    pen.font = FONT;
  },
  name(pen, text, y) {
    pen.font = this.isNarrow ? SMALL_FONT : FONT;
    pen.fillStyle = colors.soft;
    pen.fillText(text, 4, y);
    pen.font = FONT;
  },

  drawRank(pen, rank, number) {
    let top = AXIS + number * (this.rankHeight() + RANK_GAP);
    const isSlow = data.straggler && data.straggler.rank === rank.rank;
    this.title(pen, nameOf(rank) + (isSlow ? ": the others wait for it" : ""), top + RANK_TITLE / 2, isSlow ? colors.warn : colors.ink);
    top += RANK_TITLE;
    const gathers = top + COMPUTE_LANE + 2, reduces = gathers + this.laneHeight("all-gather") + 1;
    const tops = { "all-gather": gathers, "reduce-scatter": reduces };
    this.name(pen, "compute", top + COMPUTE_LANE / 2);
    for (const [kind, begin] of Object.entries(tops)) this.name(pen, kind, begin + this.laneHeight(kind) / 2);
    this.inPlot(pen, top, this.rankHeight(), () => {
      for (let n = firstReaching(rank.compute, this.begin, (item) => item[3]); n < rank.compute.length; n++) {
        const [kind, unit, begin, end] = rank.compute[n];
        if (begin > this.end) break;
        this.box(pen, { kind, unit, begin, end, rank }, top, COMPUTE_LANE);
      }
      for (const [kind, unit, issued, begin, end, bytes, row] of rank.collectives) {
        if (end < this.begin || begin > this.end) continue;
        const name = data.kinds[kind], height = this.laneHeight(name) / this.rows[name];
        const below = Math.min(row, this.rows[name] - 1) * height;
        this.box(pen, { kind, unit, begin, end, issued, bytes, rank }, tops[name] + below, height);
      }
    });
  },

  box(pen, item, top, height) {
    const left = this.x(item.begin), right = this.x(item.end), before = this.boxes.at(-1);
    const isNarrow = right - left < NARROW;
    if (isNarrow && before && before.top === top && right < before.left + NARROW) return;
    const color = KIND_COLORS[data.kinds[item.kind]], width = Math.max(right - left, NARROW);
    pen.globalAlpha = this.isFaded(item.unit) ? 0.18 : 1;
    pen.fillStyle = colors[color];
    pen.fillRect(left, top, width > 3 ? width - 0.6 : width, height < LANE ? height - 1 : height);
    if (width > 16 && height >= LANE) {
      pen.fillStyle = wordColors[color];
      pen.font = height < COMPUTE_LANE ? SMALL_FONT : FONT;
      const from = Math.max(left, this.left) + 5, room = Math.min(right, this.width) - from - 4;
      pen.fillText(clipped(pen, labelOf(data.kinds[item.kind], unitName(item.unit)), room), from, top + height / 2 + 0.5);
    }
    pen.globalAlpha = 1;
    this.boxes.push({ item, left, right: left + width, top, bottom: top + height });
  },
  isFaded(unit) {
    const name = unitName(unit);
    return this.wanted && (this.isExact ? name !== this.wanted : !name.includes(this.wanted));
  },

  drawMemory(pen, rank) {
    const top = this.memoryTop(), bottom = top + MEMORY, moments = this.visibleMoments(rank);
    const largest = Math.max(...moments.map(totalOf), 1);
    const y = (bytes) => bottom - bytes / (largest * 1.06) * MEMORY;
    this.title(pen, `memory of ${nameOf(rank)}: up to ${bytesText(largest)}`, top - RANK_TITLE / 2);
    this.inPlot(pen, top, MEMORY, () => {
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
    });
    this.drawSizes(pen, largest, y);
  },
  // The moments in view and the one before them; of those that share a pixel, the largest and the last.
  visibleMoments(rank) {
    const moments = rank.memory, found = [];
    const from = Math.max(firstReaching(moments, this.begin, (moment) => moment[0]) - 1, 0);
    let column = null, largest = null, last = null;
    const flush = () => { if (largest) found.push(...(largest === last ? [last] : [largest, last])); };
    for (let n = from; n < moments.length && moments[n][0] <= this.end; n++) {
      const here = Math.floor(this.x(moments[n][0]));
      if (here !== column) { flush(); [column, largest] = [here, moments[n]]; }
      if (totalOf(moments[n]) > totalOf(largest)) largest = moments[n];
      last = moments[n];
    }
    flush();
    return found.length ? found : [moments[0]];
  },
  // Memory stays what it was until the next moment that is known.
  outline(pen, moments, levels, y, isBackward) {
    const order = moments.map((_, n) => n);
    if (isBackward) order.reverse();
    for (const n of order) {
      const here = this.x(moments[n][0]), next = n + 1 < moments.length ? this.x(moments[n + 1][0]) : this.left + this.plotWidth;
      const [first, second] = isBackward ? [next, here] : [here, next];
      pen.lineTo(first, y(levels[n]));
      pen.lineTo(second, y(levels[n]));
    }
  },
  drawSizes(pen, largest, y) {
    const unit = 1024 ** Math.floor(Math.log(largest) / Math.log(1024)), rough = largest / unit / 4.5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = unit * [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 1;
    for (let size = 0; size <= largest * 1.06; size += every) {
      const at = Math.round(y(size)) + 0.5;
      // Not where the title stands.
      if (at > y(largest * 1.06) + 6) this.name(pen, size ? tickText(bytesText(size)) : "0", size ? at : at - 5);
      pen.globalAlpha = 0.14;
      pen.beginPath(); pen.moveTo(this.left, at); pen.lineTo(this.width - RIGHT, at); pen.stroke();
      pen.globalAlpha = 1;
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
