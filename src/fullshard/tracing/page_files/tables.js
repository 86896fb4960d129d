// Everything but the timeline: cards, advice, shares, tables. Text is set as text, never as HTML.

function element(tag, content = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...[].concat(content));
  return made;
}
const secondsText = (seconds) => (seconds > 0 ? timeText(seconds * 1e6) : "–");

function fillCards() {
  for (const { name, value, note } of data.cards) {
    const card = element("div", [element("div", name, "name"), element("div", value, "value"), element("div", note, "note")], "card");
    if (name === "straggler") card.classList.add("warn");
    byId("cards").append(card);
  }
}

function fillAdvice() {
  byId("advice-section").hidden = !data.advice.length;
  for (const { text } of data.advice.slice(0, 8)) byId("advice").append(element("li", text));
}

function fillShares() {
  for (const { rank, parts } of data.shares) {
    const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1, bar = element("div", "", "bar");
    for (const [kind, seconds] of parts) {
      const share = 100 * seconds / whole, part = element("i", share > 7 ? `${share.toFixed(0)} %` : "");
      part.style.cssText = `width:${share}%;background:var(--${KIND_COLORS[kind]})`;
      part.style.color = wordColors[KIND_COLORS[kind]];
      const words = [kind, `${secondsText(seconds)}, ${share.toFixed(1)} %`], show = (event) => showText(words, event);
      part.setAttribute("aria-label", words.join(": "));
      part.addEventListener("pointermove", show);
      part.addEventListener("click", show);
      part.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") showTooltip(null); });
      bar.append(part);
    }
    const who = element("span", data.isForetold ? "each rank" : "rank " + rank, "who");
    if (data.straggler && data.straggler.rank === rank) who.classList.add("slow");
    byId("shares").append(element("div", [who, bar], "share"));
  }
}
function showText(lines, event) {
  const tooltip = byId("tooltip");
  tooltip.hidden = false;
  tooltip.replaceChildren(element("b", lines[0]), lines[1]);
  placeTooltip(event.clientX, event.clientY);
}

// A table whose columns sort it. A column is [heading, value to sort by, cell]. Of very many rows
// the first ones are shown.
const MOST_ROWS = 500;
function fillTable(table, columns, rows, sortedBy, isDescending = true) {
  const head = element("tr"), body = element("tbody");
  const fill = () => {
    const value = columns[sortedBy][1], sign = isDescending ? -1 : 1;
    const order = [...rows].sort((a, b) => sign * (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0));
    body.replaceChildren(...order.slice(0, MOST_ROWS).map((row) => element("tr", columns.map(([, , cell]) => cell(row)))));
    [...head.children].forEach((each, n) => {
      if (n === sortedBy) each.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      else each.removeAttribute("aria-sort");
    });
  };
  columns.forEach(([heading], n) => {
    const cell = element("th", heading);
    cell.scope = "col";
    cell.tabIndex = 0;
    const sort = () => { isDescending = n === sortedBy ? !isDescending : n > 0; sortedBy = n; fill(); };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { sort(); event.preventDefault(); } });
    head.append(cell);
  });
  table.append(element("thead", head), body);
  fill();
}

function fillUnits() {
  const most = Math.max(...data.table.map((row) => row.exposed), 1e-12);
  const time = (heading, key, isExposed) => [
    heading, (row) => row[key],
    (row) => element("td", secondsText(row[key]), isExposed && row[key] > most / 10 ? "exposed" : ""),
  ];
  const unit = (row) => {
    const button = element("button", element("bdi", row.unit)), cell = element("td", button, "name");
    button.type = "button";
    button.title = `Show ${row.unit} alone in the timeline`;
    button.addEventListener("click", () => {
      timeline.wantUnit(row.unit);
      byId("timeline-section").scrollIntoView({ block: "nearest" });
    });
    return cell;
  };
  const waits = (row) => {
    const cell = element("td", secondsText(row.exposed)), meter = element("span", "", "meter");
    meter.style.width = 60 * row.exposed / most + "px";
    cell.append(meter);
    return cell;
  };
  fillTable(byId("units"), [
    ["unit", (row) => row.unit, unit],
    time("forward", "forward"), time("backward", "backward"),
    time("all-gathers", "allGather"), time("reduce-scatter", "reduceScatter"),
    time("waits in forward", "exposedForward", true), time("waits in backward", "exposedBackward", true),
    time("waits to reduce", "exposedReduce", true),
    ["all waits", (row) => row.exposed, waits],
  ], data.table, 8);
  const who = data.isForetold ? "Predicted for each rank" : `Per step, on rank ${data.ranks[0].rank}`;
  const few = data.table.length > MOST_ROWS ? ` The first ${MOST_ROWS} of ${data.table.length} units are shown.` : "";
  byId("table-hint").textContent = `${who}. Waits are the time for which compute waits for communication; the rest of the communication runs beside compute.${few}`;
}

function fillComparison() {
  byId("comparison-section").hidden = !data.comparison.length;
  const text = (value, measure) => value === null ? "–" : measure === "bytes" ? bytesText(value) : secondsText(value);
  fillTable(byId("comparison"), [
    // By the first column: in the order in which they were given, time before memory.
    ["", (row) => data.comparison.indexOf(row), (row) => element("td", row[0])],
    ["predicted", (row) => row[1] ?? 0, (row) => element("td", text(row[1], row[3]))],
    ["measured", (row) => row[2] ?? 0, (row) => element("td", text(row[2], row[3]))],
    ["measured / predicted", (row) => row[1] && row[2] !== null ? row[2] / row[1] : 0,
      (row) => element("td", row[1] && row[2] !== null ? (row[2] / row[1]).toFixed(2) : "–")],
  ], data.comparison, 0, false);
}

function fillRanks() {
  byId("ranks-section").hidden = data.isForetold || data.summaries.length < 2;
  const time = (heading, key) => [heading, (row) => row[key], (row) => element("td", secondsText(row[key]))];
  const isSlow = (row) => data.straggler && data.straggler.rank === row.rank;
  fillTable(byId("ranks"), [
    ["rank", (row) => row.rank, (row) => element("td", `rank ${row.rank}${isSlow(row) ? " (straggler)" : ""}`, isSlow(row) ? "exposed" : "")],
    time("step", "step"), time("busy", "busy"), time("waits", "waits"),
    ["peak memory", (row) => row.peak ?? 0, (row) => element("td", row.peak ? bytesText(row.peak) : "–")],
    ["host", (row) => row.host, (row) => element("td", row.host.split(" ")[0])],
  ], data.summaries, 2);
}

byId("title").textContent = data.title;
byId("subtitle").textContent = data.subtitle;
byId("facts").textContent = data.facts.map(([name, value]) => `${name} ${value}`).join(" · ");
readColors();
fillCards();
fillAdvice();
fillShares();
fillComparison();
fillUnits();
fillRanks();
timeline.start();
timeline.draw();
