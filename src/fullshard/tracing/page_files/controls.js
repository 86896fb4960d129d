// What the reader does with the timeline: buttons, keys, hovering, moving, zooming.

const MOST_STEP_BUTTONS = 4;

Object.assign(timeline, {
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
    const choose = (label, options, act) => {
      const select = document.createElement("select");
      select.setAttribute("aria-label", label);
      for (const [text, value] of options) select.add(new Option(text, value));
      select.addEventListener("change", () => act(select.value));
      controls.append(select);
      return select;
    };
    const steps = data.ranks[0].steps;
    this.spans = [[this.low, this.high], ...steps];
    const showSpan = (n) => { if (this.spans[n]) this.show(...this.spans[n]); };
    if (steps.length > MOST_STEP_BUTTONS) {
      const options = steps.map((_, n) => ["step " + (n + 1), n + 1]);
      this.stepChoice = choose("Which step to show", [["all steps", 0], ...options, ["a part", ""]], showSpan);
      this.stepChoice.options[steps.length + 1].hidden = true;
    } else {
      const names = ["all", ...(steps.length > 1 ? steps.map((_, n) => "step " + (n + 1)) : [])];
      this.stepButtons = names.map((name, n) => add(name, n ? `Show ${name}` : "Show everything", () => showSpan(n)));
    }
    add("−", "Zoom out", () => this.zoom(1.6)).id = "zoom-out";
    add("+", "Zoom in", () => this.zoom(1 / 1.6)).id = "zoom-in";
    if (data.ranks.length > 1 && this.hasMemory()) {
      const options = data.ranks.map((rank, n) => ["memory of rank " + rank.rank, n]);
      const select = choose("Whose memory to show", options, (n) => { this.memoryOf = Number(n); this.draw(); });
      select.value = this.memoryOf;
    }
    const search = document.createElement("input");
    search.type = "search";
    search.placeholder = "find a unit";
    search.setAttribute("aria-label", "Find a unit by its name");
    search.addEventListener("input", () => this.want(search.value));
    controls.append(search);
    this.search = search;
    byId("hint").textContent = matchMedia("(hover: none)").matches
      ? "Drag to move, pinch to zoom, tap for details."
      : "Drag to move, Ctrl + scroll to zoom, hover for details, click a unit to see it alone. With the focus on the picture, arrow keys move and zoom.";
    this.markStep();
  },
  // Say which of the steps is shown, if one is.
  markStep() {
    const isShown = ([begin, end]) => Math.abs(this.begin - begin) + Math.abs(this.end - end) < (end - begin) * 0.01;
    const shown = this.spans.findIndex(isShown);
    if (this.stepChoice) this.stepChoice.value = shown < 0 ? "" : shown;
    (this.stepButtons || []).forEach((button, n) => button.setAttribute("aria-pressed", String(isShown(this.spans[n]))));
  },
  // Fade all units but those whose names have a text in them, or the one with exactly this name.
  want(text, isExact = false) {
    [this.wanted, this.isExact] = [text, isExact];
    if (this.search.value !== text) this.search.value = text;
    this.draw();
  },
  wantUnit(name) { this.want(name === this.wanted ? "" : name, true); },

  makeLegend() {
    const used = new Set(data.ranks.flatMap((rank) => [...rank.compute, ...rank.collectives].map((item) => item[0])));
    const add = (title, entries) => {
      const group = document.createElement("div"), name = document.createElement("b");
      name.textContent = title;
      group.append(name);
      for (const [text, color] of entries) {
        const entry = document.createElement("span"), swatch = document.createElement("i");
        swatch.className = "swatch";
        swatch.style.background = `var(--${color})`;
        entry.append(swatch, text);
        group.append(entry);
      }
      byId("legend").append(group);
    };
    add("time", data.kinds.map((kind, n) => [kind, KIND_COLORS[kind], n]).filter(([, , n]) => used.has(n)));
    if (this.hasMemory()) add("memory", data.causes.map((cause, n) => [cause, CAUSE_COLORS[n]]));
  },
});

// -- hovering and moving ------------------------------------------------------------------------

function describe(found) {
  const lines = [];
  if (found.moment) {
    const [at, ...sizes] = found.moment;
    lines.push(`memory ${bytesText(totalOf(found.moment))} at ${timeText(at - timeline.stepBegin(at))}`);
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
  placeTooltip(x, y);
}
function placeTooltip(x, y) {
  const tooltip = byId("tooltip"), { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = Math.max(6, Math.min(x + 14, innerWidth - width - 6)) + "px";
  tooltip.style.top = (y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18) + "px";
}
// A line through all lanes and the memory at one moment; null hides it.
function showCursor(x) {
  const cursor = byId("cursor");
  cursor.hidden = x === null || x < timeline.left;
  if (!cursor.hidden) cursor.style.left = x + "px";
}

function listen(timeline) {
  const canvas = timeline.canvas, pointers = new Map();
  let moved = false;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const hide = () => { showTooltip(null); showCursor(null); };
  const point = (event) => {
    const [x, y] = at(event), found = timeline.find(x, y);
    showTooltip(found, event.clientX, event.clientY);
    showCursor(x);
    return found;
  };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
    moved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) { point(event); return; }
    const before = [...pointers.values()];
    const step = event.clientX - pointers.get(event.pointerId);
    if (pointers.size === 1 && Math.abs(step) < 4 && !moved) return;
    moved = true;
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 1) timeline.move(-step * timeline.perPixel);
    else if (pointers.size === 2) {
      const after = [...pointers.values()], box = canvas.getBoundingClientRect();
      const spread = (pair) => Math.max(Math.abs(pair[0] - pair[1]), 10);
      timeline.zoom(spread(before) / spread(after), timeline.at((after[0] + after[1]) / 2 - box.left));
    }
    hide();
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", (event) => {
    release(event);
    if (moved) return;
    const found = point(event);
    if (event.pointerType !== "mouse") return;
    const name = found && typeof found.unit === "number" ? unitName(found.unit) : "";
    if (name || timeline.wanted) timeline.wantUnit(name);
  });
  canvas.addEventListener("pointercancel", release);
  // A finger leaves when it is lifted, and what it tapped on stays described until the next tap.
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  document.addEventListener("pointerdown", (event) => { if (event.target !== canvas) hide(); });
  document.addEventListener("scroll", hide, { passive: true });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (event.ctrlKey || event.metaKey) timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), timeline.at(at(event)[0]));
    else if (sideways) timeline.move(sideways * timeline.perPixel);
    else return;
    hide();
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
    if (acts[event.key] && !event.ctrlKey && !event.metaKey) { acts[event.key](); event.preventDefault(); }
  });
}
