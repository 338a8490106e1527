"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const columns = new Map(report.columns.map((column) => [column.name, column]));
  const panel = document.getElementById("panel");
  const tip = document.getElementById("tip");
  const FIRST = 3; // how many heads are marked as the ones to look at
  const DENSE = 24; // beyond this many heads a layer, numbers do not fit in the cells
  const DEEP = 0.6; // beyond this shade, text is in the other color
  const BESIDE = ["attention_branch_constant", "mlp_branch_constant", "block_constant", "word_deviation"];
  const PLACE = /^#(head|layer)-(\d+)(?:-(\d+))?$/;
  const state = { column: null, input: null, shown: 0, sort: "moved", descending: true, text: null, change: null };

  // Numbers

  function number(value) {
    if (value === "inf") return Infinity;
    if (value === "-inf") return -Infinity;
    return typeof value === "number" ? value : NaN;
  }

  /* ≤ for what is proved and ≥ for what is searched; reversed where small numbers are the bad ones. */
  function side(column) {
    if (column.kind !== "proved" && column.kind !== "searched") return "";
    return (column.kind === "proved") !== (column.high_is_alarming === false) ? "≤" : "≥";
  }

  function threeDigits(value, way) {
    if (!way) return value.toExponential(2).split("e").map(Number);
    const [all, exponent] = Math.abs(value).toExponential(100).split("e");
    const away = (way === "≤") === value > 0 && /[1-9]/.test(all.slice(4));
    const digits = (Number(all.slice(0, 4)) + (away ? 0.01 : 0)).toFixed(2);
    const signed = Math.sign(value) * Number(digits === "10.00" ? 1 : digits);
    return [signed, Number(exponent) + (digits === "10.00" ? 1 : 0)];
  }

  function superscript(integer) {
    return [...String(integer)].map((sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign])).join("");
  }

  function written(value, way = "") {
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (value === 0) return "0";
    const [digits, exponent] = threeDigits(value, way);
    if (exponent < -3 || exponent > 4) return `${digits.toFixed(2)}·10${superscript(exponent)}`.replace("-", "−");
    return Number(`${digits}e${exponent}`).toFixed(Math.max(0, 2 - exponent)).replace("-", "−");
  }

  function percent(share) {
    return `${Number((100 * share).toPrecision(6))} %`;
  }

  function over(column) {
    const words = { largest: "the largest", smallest: "the smallest", mean: "the mean", median: "the median" };
    return report.inputs.length > 1 && words[column.over] ? ` Over several inputs: ${words[column.over]}.` : "";
  }

  function explained(column) {
    const status = report.statuses[column.kind];
    return status ? `${column.meaning} ${column.kind[0].toUpperCase()}${column.kind.slice(1)}: ${status}.` : column.meaning;
  }

  function figure(value, column, where) {
    const exactly = Number.isFinite(value) ? String(value) : written(value);
    const text = `${where ? `${where}. ` : ""}${column.title}: ${exactly}\n${explained(column)}${column.over ? over(column) : ""}`;
    return element("span", { class: "number", "data-number": value, "data-kind": column.kind, "data-side": side(column) || null, "data-tip": text }, written(value, side(column)));
  }

  // Elements: texts become text nodes, never markup

  function fill(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  }
  const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const drawn = (name, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

  function shaded(made, share) {
    made.style.setProperty("--s", Number.isNaN(share) ? 0 : share.toFixed(3));
    made.classList.toggle("deep", share > DEEP);
    return made;
  }

  function info(column) {
    return element("button", { type: "button", class: "info", "data-tip": explained(column), "aria-label": `${column.title}: ${explained(column)}` }, "i");
  }

  function kind(name) {
    return name ? element("span", { class: `kind ${name}` }, name) : null;
  }

  function choice(label, options, value, changed) {
    const select = element("select", {}, ...options);
    select.value = value;
    select.addEventListener("change", () => changed(select.value));
    return element("label", {}, label, select);
  }

  const option = (value, text) => element("option", { value }, text);
  const paragraph = (...children) => element("p", {}, ...children);
  const soft = (...children) => element("p", { class: "soft" }, ...children);

  function scrolling(label, child, extra = "") {
    return element("div", { class: `scroll ${extra}`, tabindex: 0, role: "region", "aria-label": label }, child);
  }

  function fold(title, child) {
    return element("details", { class: "fold" }, element("summary", {}, title), child);
  }

  function opened(id) {
    document.getElementById(id).hidden = false;
    document.querySelector(`[data-for="${id}"]`).hidden = false;
    const box = element("div");
    document.getElementById(id).append(box);
    return box;
  }

  // What is in the report

  const rows = (scope) => report.rows.filter((row) => row.scope === scope);
  const heads = new Map(rows("head").map((row) => [`${row.layer}-${row.head}`, row]));
  const layers = new Map(rows("layer").map((row) => [row.layer, row]));
  const sites = report.coverage.filter((entry) => entry.layer >= 0).sort((a, b) => a.layer - b.layer);
  const shortNames = shortened(sites);
  const table = (name, site, input) => (report.tables[name] || []).find((entry) => entry.site === site && entry.input === input);
  const known = (scope) => report.columns.filter((column) => column.scope === scope && report.rows.some((row) => row.scope === scope && column.name in row.values));

  function valueOf(row, name, input = null) {
    if (!row || !(name in row.values)) return NaN;
    const numbers = row.inputs[name] || [];
    return input === null || numbers.length <= 1 && report.inputs.length > 1 ? number(row.values[name]) : number(numbers[input]);
  }

  function inputName(index) {
    const letters = [...report.inputs[index].name];
    return `${index + 1}. ${letters.length > 60 ? `${letters.slice(0, 59).join("")}…` : letters.join("")}`;
  }

  function inputsWith(name) {
    return [...new Set((report.tables[name] || []).map((entry) => entry.input))].filter((index) => report.inputs[index]).sort((a, b) => a - b);
  }

  function tokenNames(input, count) {
    const names = report.inputs[input] ? report.inputs[input].tokens : [];
    return names.length === count ? names.map((name) => name.replace(/^[Ġ▁]/, "").replace(/^Ċ$/, "⏎") || "␣") : Array.from({ length: count }, (_, i) => String(i));
  }

  /* Names of modules without what all of them share at the front and at the end: mostly a number. */
  function shortened(entries) {
    const names = entries.map((entry) => entry.site.split("."));
    const same = (at) => names.length > 1 && names.every((name) => at(name) !== undefined && at(name) === at(names[0]));
    let [start, end] = [0, 0];
    while (same((name) => name[start])) start += 1;
    while (same((name) => (name.length - end > start ? name[name.length - 1 - end] : undefined))) end += 1;
    return new Map(entries.map((entry, i) => [entry.layer, names[i].slice(start, names[i].length - end).join(".") || entry.site || "0"]));
  }

  // Scales and plots

  function scale(values, low = null) {
    const finite = values.filter(Number.isFinite);
    const [least, most] = [low === null ? Math.min(...finite) : low, Math.max(...finite)];
    const logarithmic = least > 0 && most / least > 50;
    const bent = logarithmic ? Math.log : (value) => value;
    const share = (value) => (value === Infinity ? 1 : value === -Infinity ? 0 : most > least ? (bent(value) - bent(least)) / (bent(most) - bent(least)) : 0);
    return { share: (value) => (Number.isNaN(value) ? NaN : share(value)), least, most, logarithmic, empty: !finite.length };
  }

  function decades(low, high) {
    const [first, last] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
    const step = Math.max(1, Math.ceil((last - first) / 6));
    const every = Array.from({ length: last - first + 1 }, (_, i) => first + i).filter((power) => (power - first) % step === 0);
    return { low: 10 ** first, high: 10 ** Math.max(last, first + 1), ticks: every.map((power) => 10 ** power) };
  }

  function steps(low, high) {
    const rough = (high - low || Math.abs(high) || 1) / 4;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
    const [first, last] = [Math.floor(low / step), Math.max(Math.ceil(high / step), Math.floor(low / step) + 1)];
    return { low: first * step, high: last * step, ticks: Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step) };
  }

  function tickText(value, axis) {
    if (axis.name) return axis.name(value);
    if (axis.log && (value >= 1e4 || value < 1e-2)) return `10${superscript(Math.round(Math.log10(value)))}`;
    return String(Number(value.toPrecision(6)));
  }

  function axisOf(axis, values) {
    const usable = values.filter((value) => Number.isFinite(value) && (!axis.log || value > 0));
    if (axis.every) return { ...axis, low: Math.min(...axis.every), high: Math.max(...axis.every), ticks: axis.every };
    const [low, high] = [Math.min(...usable), Math.max(...usable)];
    return { ...axis, ...(axis.log ? decades(low, high) : steps(axis.zero ? Math.min(0, low) : low, high)) };
  }

  function position(axis, from, to) {
    const bent = axis.log ? Math.log : (value) => value;
    const width = bent(axis.high) - bent(axis.low);
    return (value) => (width > 0 ? from + ((bent(value) - bent(axis.low)) / width) * (to - from) : (from + to) / 2);
  }

  const SHAPES = {
    circle: (x, y) => drawn("circle", { cx: x, cy: y, r: 4.5 }),
    square: (x, y) => drawn("rect", { x: x - 4, y: y - 4, width: 8, height: 8 }),
    triangle: (x, y) => drawn("path", { d: `M${x} ${y - 5.5}L${x + 5} ${y + 4}H${x - 5}Z` }),
  };
  const SHAPE = ["circle", "square", "triangle"];

  function mark(tone, x, y, text) {
    return fill(SHAPES[SHAPE[tone]](x, y), { class: `mark tone-${tone}`, "data-tip": text }, []);
  }

  function seriesLegend(series, lines) {
    const sample = (tone) => drawn("svg", { width: 28, height: 12, "aria-hidden": "true" }, lines ? drawn("path", { class: `line tone-${tone}`, d: "M0 6H28" }) : null, mark(tone, 14, 6));
    return element("ul", { class: "series" }, series.map((one, tone) => element("li", {}, sample(tone), one.name)));
  }

  /* series: at most three of {name, points: [{x, y, text, chosen, pick}]}; lines: whether points are joined. */
  function chart({ x, y, series, lines = true, label }) {
    const box = element("div", { class: "chart" });
    const usable = series.map((one) => ({ ...one, points: one.points.filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && (!x.log || p.x > 0) && (!y.log || p.y > 0)) }));
    const points = usable.flatMap((one) => one.points);
    if (!points.length) return fill(box, {}, [soft("No finite number to draw.")]);
    const [across, up] = [axisOf(x, points.map((p) => p.x)), axisOf(y, points.map((p) => p.y))];
    const canvas = element("div", { class: "canvas" });
    let last = 0;
    const draw = (width) => {
      if (Math.abs(width - last) < 8) return;
      last = width;
      canvas.replaceChildren(picture(Math.max(260, width), across, up, usable, lines, label));
    };
    new ResizeObserver((entries) => draw(entries[0].contentRect.width)).observe(canvas);
    return fill(box, {}, [canvas, seriesLegend(series, lines)]);
  }

  function picture(width, across, up, series, lines, label) {
    const [left, right, top, height] = [52, 14, 26, 290];
    const bottom = height - 44;
    const [px, py] = [position(across, left, width - right), position(up, bottom, top)];
    const made = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const tick of up.ticks) made.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), drawn("text", { x: left - 8, y: py(tick) + 4, "text-anchor": "end" }, tickText(tick, up)));
    const thin = Math.ceil(across.ticks.length / Math.max(2, Math.floor((width - left) / 44)));
    across.ticks.forEach((tick, i) => { if (i % thin === 0) made.append(drawn("text", { x: px(tick), y: bottom + 18, "text-anchor": "middle" }, tickText(tick, across))); });
    made.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }));
    made.append(drawn("text", { x: 0, y: 12 }, up.label), drawn("text", { x: width - right, y: height - 6, "text-anchor": "end" }, across.label));
    [...series].reverse().forEach((one, i) => plotted(made, one, series.length - 1 - i, px, py, lines));
    return made;
  }

  function plotted(made, one, tone, px, py, lines) {
    if (lines) made.append(drawn("path", { class: `line tone-${tone}`, d: one.points.map((p, i) => `${i ? "L" : "M"}${px(p.x).toFixed(1)} ${py(p.y).toFixed(1)}`).join("") }));
    for (const p of one.points) {
      const sign = mark(tone, px(p.x), py(p.y), p.text);
      if (p.chosen) sign.classList.add("chosen");
      if (p.pick) sign.addEventListener("click", p.pick);
      made.append(sign);
    }
  }

  // The map of the heads

  function grouped(names) {
    const left = new Set(names);
    const groups = report.checks.map((check) => [check.question, check.columns.filter((name) => left.delete(name))]);
    return [...groups, ["Others", [...left]]].filter(([, own]) => own.length);
  }

  function columnOptions(names) {
    return grouped(names).map(([question, own]) => element("optgroup", { label: question }, own.map((name) => option(name, columns.get(name).title))));
  }

  function inputOptions() {
    return [option("", "all inputs together"), ...report.inputs.map((_, i) => option(String(i), inputName(i)))];
  }

  function drawHeads(box) {
    const names = known("head").map((column) => column.name);
    const place = element("div");
    const again = () => place.replaceChildren(...headMap());
    state.column = ["head_branch_constant", "head_constant", names[0]].find((name) => names.includes(name));
    const controls = element("div", { class: "controls" }, choice("colored by", columnOptions(names), state.column, (name) => { state.column = name; again(); }));
    if (report.inputs.length > 1) controls.append(choice("numbers of", inputOptions(), "", (index) => { state.input = index === "" ? null : Number(index); again(); }));
    box.append(soft("A row is a layer, a cell is a head. Open a head or a layer for its numbers, its bounds and where it looks. Arrow keys move between heads."), controls, place);
    again();
    document.querySelector("header.top").append(fingerprint());
  }

  /* The map again, small: what the model looks like at a glance. */
  function fingerprint() {
    const shade = scale(rows("head").map((row) => valueOf(row, state.column)));
    const falling = columns.get(state.column).high_is_alarming === false;
    const widest = Math.max(...[...heads.values()].map((row) => row.head)) + 1;
    const deepest = Math.max(...sites.map((site) => site.layer)) + 1;
    const made = drawn("svg", { viewBox: `0 0 ${widest} ${deepest}`, "aria-hidden": "true" });
    for (const row of heads.values()) {
      const share = shade.share(valueOf(row, state.column));
      const square = drawn("rect", { x: row.head + 0.06, y: row.layer + 0.06, width: 0.88, height: 0.88, rx: 0.12 });
      square.style.setProperty("--s", Number.isNaN(share) ? 0 : (falling ? 1 - share : share).toFixed(3));
      made.append(square);
    }
    return element("a", { class: "fingerprint", href: "#heads", "aria-label": "Map of the heads" }, made);
  }

  function firstHeads(column) {
    if (column.high_is_alarming === null) return [];
    const sign = column.high_is_alarming ? -1 : 1;
    const measured = rows("head").filter((row) => !Number.isNaN(valueOf(row, column.name, state.input)));
    const order = (row) => sign * valueOf(row, column.name, state.input);
    return measured.sort((a, b) => (order(a) < order(b) ? -1 : order(a) > order(b) ? 1 : 0)).slice(0, FIRST);
  }

  function headMap() {
    const column = columns.get(state.column);
    const shade = scale(rows("head").map((row) => valueOf(row, column.name, state.input)));
    const falling = column.high_is_alarming === false;
    const widest = Math.max(...[...heads.values()].map((row) => row.head)) + 1;
    const besides = beside();
    const first = new Set(firstHeads(column));
    const cell = (row) => headCell(row, column, falling ? 1 - shade.share(valueOf(row, column.name, state.input)) : shade.share(valueOf(row, column.name, state.input)), first.has(row));
    const lines = sites.map((site) => mapRow(site, widest, cell, besides));
    const made = element("table", { class: widest > DENSE ? "map dense" : "map" }, mapHead(widest, besides), element("tbody", {}, lines));
    made.querySelector("a.cell")?.setAttribute("tabindex", "0");
    made.addEventListener("keydown", rove);
    return [paragraph(element("b", {}, column.title), " ", kind(column.kind), " ", element("span", { class: "soft" }, `${column.meaning}${over(column)}`)), scrolling("Map of the heads", made), ramp(shade, column, first.size)];
  }

  function beside() {
    const names = known("layer").map((column) => column.name).filter((name) => sameInputs(name, state.column));
    const wanted = BESIDE.filter((name) => names.includes(name));
    return (wanted.length ? wanted : names.slice(0, 4)).map((name) => [columns.get(name), scale([...layers.values()].map((row) => valueOf(row, name, state.input)))]);
  }

  /* Whether numbers of two columns may stand side by side: those of one input, or those over the same inputs. */
  function sameInputs(name, other) {
    const covered = (one) => (columns.get(one).over === "only" ? report.inputs.length : Math.max(0, ...report.rows.map((row) => inputsOf(row, one).length)));
    return state.input !== null || report.inputs.length < 2 || covered(name) === covered(other);
  }

  function mapHead(widest, besides) {
    const titles = besides.map(([column]) => element("th", { scope: "col", class: "layer-title", "data-tip": explained(column) }, column.title));
    const numbers = Array.from({ length: widest }, (_, head) => element("th", { scope: "col" }, element("span", { "aria-label": `head ${head}` }, String(head))));
    return element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "layer"), numbers, besides.length ? element("td", { class: "gap" }) : null, titles));
  }

  function mapRow(site, widest, cell, besides) {
    const own = Array.from({ length: widest }, (_, head) => heads.get(`${site.layer}-${head}`));
    const row = layers.get(site.layer);
    const opens = row || own.some(Boolean);
    const title = element("th", { scope: "row", "data-tip": site.site || "the model" }, opens ? element("a", { href: `#layer-${site.layer}`, "aria-label": site.site || "the model" }, shortNames.get(site.layer)) : shortNames.get(site.layer));
    if (!opens) return element("tr", {}, title, element("td", { class: "uncovered", colspan: widest, "data-tip": site.reason || "nothing was measured" }, site.covered ? "nothing measured" : "not covered"));
    const extra = besides.map(([column, shade]) => element("td", { class: "layer" }, layerCell(row, column, shade)));
    return element("tr", {}, title, own.map((head) => element("td", {}, head ? cell(head) : null)), besides.length ? element("td", { class: "gap" }) : null, extra);
  }

  function headCell(row, column, share, first) {
    const value = valueOf(row, column.name, state.input);
    const shown = figure(value, column, `${row.site || "the model"}, head ${row.head}`);
    const label = `${row.site || "the model"}, head ${row.head}: ${written(value, side(column))}${first ? ", look at it first" : ""}`;
    const made = element("a", { class: "cell", href: `#head-${row.layer}-${row.head}`, tabindex: -1, "aria-label": label, "data-tip": shown.dataset.tip }, first ? "◆ " : null, shown);
    made.classList.toggle("first", first);
    made.classList.toggle("unknown", Number.isNaN(value));
    return shaded(made, share);
  }

  function layerCell(row, column, shade) {
    const value = valueOf(row, column.name, state.input);
    const made = element("span", { class: "cell" }, figure(value, column, row ? row.site || "the model" : ""));
    made.classList.toggle("unknown", Number.isNaN(value));
    return shaded(made, column.high_is_alarming === false ? 1 - shade.share(value) : shade.share(value));
  }

  function ramp(shade, column, marked) {
    if (shade.empty) return soft("No finite number in this column.");
    const falling = column.high_is_alarming === false;
    const words = column.high_is_alarming === null ? "neither end is alarming, so no head is marked" : `the ${falling ? "lower" : "higher"}, the sooner it deserves a look`;
    const ends = [figure(shade.least, column), element("i", { "aria-hidden": "true" }), figure(shade.most, column)];
    return element("div", { class: falling ? "ramp falling" : "ramp" }, ends, element("span", {}, `${shade.logarithmic ? "logarithmic; " : ""}${words}`), marked ? element("span", {}, element("span", { class: "key" }, "◆"), " look at these first") : null);
  }

  function rove(event) {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const cell = event.target.closest("td");
    if (!move || !cell || !event.target.matches("a.cell")) return;
    event.preventDefault();
    const lines = [...cell.closest("tbody").rows];
    let line = lines.indexOf(cell.parentNode) + move[0];
    while (lines[line] && move[0] && !lines[line].cells[cell.cellIndex]?.querySelector("a.cell")) line += move[0];
    const next = lines[line]?.cells[cell.cellIndex + move[1]]?.querySelector("a.cell");
    if (!next) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  // Panels: one for each head and layer, by the address

  function route() {
    const found = PLACE.exec(location.hash);
    const content = found && (found[1] === "head" ? headPanel(Number(found[2]), Number(found[3])) : layerPanel(Number(found[2])));
    if (!content) return panel.open ? panel.close() : undefined;
    panel.replaceChildren(...content);
    if (!panel.open) panel.showModal();
    panel.scrollTop = 0;
    panel.querySelector("h2").focus();
  }

  function close() {
    history.pushState(null, "", location.pathname + location.search);
    route();
  }

  function redraw() {
    const top = panel.scrollTop;
    route();
    panel.scrollTop = top;
    panel.querySelector("select")?.focus();
  }

  function panelHeader(title, under, before, after) {
    const link = (target, text) => (target ? element("a", { class: "button", href: target[0], "aria-label": target[1] }, text) : null);
    const leave = element("button", { type: "button", class: "button close" }, "Close");
    leave.addEventListener("click", close);
    return [element("header", {}, link(before, "← previous"), link(after, "next →"), leave), element("h2", { id: "panel-title", tabindex: -1 }, title), under];
  }

  function inputChoice() {
    if (report.inputs.length < 2) return null;
    return element("div", { class: "controls" }, choice("input", report.inputs.map((_, i) => option(String(i), inputName(i))), String(state.shown), (index) => { state.shown = Number(index); redraw(); }));
  }

  function headPanel(layer, head) {
    const row = heads.get(`${layer}-${head}`);
    if (!row) return null;
    const order = [...heads.values()];
    const target = (other) => other && [`#head-${other.layer}-${other.head}`, `${other.site}, head ${other.head}`];
    const at = order.indexOf(row);
    const under = soft(element("a", { href: `#layer-${layer}` }, `all of ${row.site || "the model"}`), ` · row ${layer} of the map`);
    return [
      ...panelHeader(`${row.site || "the model"}, head ${head}`, under, target(order[at - 1]), target(order[at + 1])),
      ...findingsAt(layer, head), inputChoice(), ...numbersOf(row, "head"), ...ladder(row), ...law(row), ...influenceIn(state.shown, "h3"),
    ].filter(Boolean);
  }

  function findingsAt(layer, head) {
    const own = report.findings.filter((finding) => finding.layer === layer && finding.head === head);
    return own.map((finding) => element("div", { class: `finding ${finding.level}` }, paragraph(element("span", { class: `level ${finding.level}` }, finding.level), element("b", {}, finding.what)), paragraph(finding.why), paragraph(element("b", {}, "What to do. "), finding.advice)));
  }

  function inputsOf(row, name) {
    return (row.inputs[name] || []).flatMap((value, i) => (Number.isNaN(number(value)) ? [] : [i]));
  }

  /* A number with the inputs that it is of, and beside it what it is compared with, over the same inputs. */
  function overInputs(row, column) {
    const [shown, inputs] = [figure(valueOf(row, column.name), column), inputsOf(row, column.name)];
    if (report.inputs.length < 2 || column.over === "only" || !inputs.length) return [shown];
    if (inputs.length === report.inputs.length) return [element("small", {}, `${column.over} `), shown];
    const where = `${inputs.length > 1 ? `${column.over} of inputs` : "input"} ${inputs.map((i) => i + 1).join(", ")} `;
    const pair = (row.beside || {})[column.name];
    const other = pair && pair.inputs.length === inputs.length ? columns.get(pair.column) : null;
    return [element("small", {}, where), shown, other ? element("small", {}, ` (${other.title} there: `, figure(number(pair.other), { ...other, over: "" }), ")") : null];
  }

  function numbersOf(row, scope) {
    const several = report.inputs.length > 1;
    const titles = ["", several ? "all inputs" : "value", ...(several ? [`input ${state.shown + 1}`] : []), "status"];
    const lines = known(scope).filter((column) => column.name in row.values).map((column) => element("tr", { "data-column": column.name },
      element("th", { scope: "row" }, column.title, " ", info(column)),
      element("td", { class: "right" }, ...overInputs(row, column)),
      several ? element("td", { class: "right" }, figure(valueOf(row, column.name, state.shown), { ...column, over: "" })) : null,
      element("td", {}, kind(column.kind))));
    const made = element("table", { class: "plain numbers" }, element("thead", {}, element("tr", {}, titles.map((title, i) => element("th", { scope: "col", class: i && i < titles.length - 1 ? "right" : null }, title)))), element("tbody", {}, lines));
    return [element("h3", {}, "Numbers"), scrolling("Numbers", made)];
  }

  function absent(name, what) {
    const those = inputsWith(name);
    return those.length ? soft(`${what} of this input ${what.endsWith("s") ? "are" : "is"} not in the report; see input ${those.map((i) => i + 1).join(", ")}.`) : null;
  }

  // The ladder: everything proved about a head, beside its measured constant

  function rungsOf(row) {
    const found = table("bounds", row.site, state.shown);
    const own = found && found.heads[row.head];
    if (!own) return [];
    const named = (where, list) => (list || []).map(([theorem, value, chance = 1]) => ({ theorem: theorem.split(": ")[0], full: chance < 1 ? `${theorem}; holds with probability 1 - ${(1 - chance).toExponential(0)} over the random start of its own proof` : theorem, where, value: number(value), kind: "proved" }));
    return [...named("at this input", own.point), ...named("on the ball that its tokens fill", own.ball)];
  }

  function ladder(row) {
    const proved = rungsOf(row);
    const measured = valueOf(row, "head_constant", report.inputs.length ? state.shown : null);
    if (!proved.length) return [known("head").some((column) => column.name === "point_bound") ? absent("bounds", "Bounds") : null];
    const first = Number.isNaN(measured) ? [] : [{ theorem: "local constant", full: columns.get("head_constant").meaning, where: "at this input", value: measured, kind: "measured" }];
    const rungs = [...first, ...proved];
    const positive = rungs.map((rung) => rung.value).filter((value) => Number.isFinite(value) && value > 0);
    const axis = { log: true, ...(positive.length ? decades(Math.min(...positive), Math.max(...positive)) : { low: 1, high: 10, ticks: [1, 10] }) };
    const at = (value) => (value === Infinity ? 100 : value > 0 ? Math.max(0.5, position(axis, 0, 100)(value)) : 0);
    const ticks = element("div", { class: "ticks", "aria-hidden": "true" }, axis.ticks.map((tick) => { const made = element("span", {}, tickText(tick, axis)); made.style.left = `${Math.min(97, Math.max(2, at(tick)))}%`; return made; }));
    return [element("h3", {}, "Ladder of bounds"), soft("Each rung is a theorem that applies to this head; the smallest counts. The solid bar and the dashed line are the constant measured at this input, hatched bars are proved. Logarithmic scale.", ...ballRadius(row)), element("ol", { class: "ladder" }, rungs.map((rung) => rungRow(rung, at, measured))), ticks];
  }

  function ballRadius(row) {
    const radius = number(table("bounds", row.site, state.shown).heads[row.head].radius);
    const column = { title: "radius", meaning: "Largest distance of a token from their mean, in the coordinates that the head reads.", kind: "run" };
    return Number.isNaN(radius) ? [] : [" The ball that the tokens fill has radius ", figure(radius, column), "."];
  }

  function rungRow(rung, at, measured) {
    const column = { title: rung.theorem, meaning: `${rung.full} (${rung.where}).`, kind: rung.kind };
    const bar = drawn("rect", { class: `bar ${rung.kind}`, x: 0, y: 3, height: 10, width: `${at(rung.value).toFixed(2)}%` });
    const here = Number.isNaN(measured) ? null : drawn("line", { class: "here", x1: `${at(measured).toFixed(2)}%`, x2: `${at(measured).toFixed(2)}%`, y1: -3, y2: 19 });
    const words = element("span", {}, kind(rung.kind), " ", rung.theorem, element("span", { class: "soft" }, `, ${rung.where}`));
    return element("li", {}, element("div", { class: "row" }, words, element("b", {}, rung.kind === "proved" ? "≤ " : null, figure(rung.value, column))), drawn("svg", { "aria-hidden": "true" }, drawn("line", { class: "track", x1: 0, x2: "100%", y1: 8, y2: 8 }), bar, here));
  }

  // The law of a head: where each query looks

  function law(row) {
    const found = table("rows", row.site, state.shown);
    const own = found && found.laws && found.laws[row.head];
    if (!own || !own.length || !own[0].length) return [absent("rows", "Laws")];
    const readout = element("p", { class: "readout", "aria-live": "polite" }, "Hover over a cell, or use the arrow keys.");
    return [element("h3", {}, "Where it looks"), soft("A row is the law of one query over the keys; the numbers of a row add up to one. The shade is the square root of the number. ", kind("run"), " to three decimals."), scrolling("Law of the head", lawPicture(own, readout)), readout];
  }

  function short(name, length) {
    const letters = [...name];
    return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : name;
  }

  const LAW = { shade: Math.sqrt, printed: (value) => (value >= 0.1 ? value.toFixed(2).replace(/^0/, "") : ""), said: (value) => value.toFixed(3), verb: "looks at", after: "with", kind: "run", tip: "A weight of the attention row, to three decimals. Run.", label: (n, m) => `Attention of ${n} queries over ${m} keys; arrow keys read the numbers` };

  function lawPicture(matrix, readout, input = state.shown, way = LAW) {
    const [queries, keys] = [tokenNames(input, matrix.length), tokenNames(input, matrix[0].length)];
    const size = matrix[0].length <= 20 ? 28 : 15;
    const [left, top] = [86, 74];
    const [width, height] = [left + size * keys.length + 30, top + size * queries.length + 4];
    const made = drawn("svg", { class: "law", width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": way.label(queries.length, keys.length) });
    matrix.forEach((one, i) => one.forEach((value, j) => made.append(...lawCell(number(value), left + j * size, top + i * size, size, way))));
    queries.forEach((name, i) => made.append(drawn("text", { x: left - 6, y: top + i * size + size / 2 + 4, "text-anchor": "end" }, short(name, 11))));
    keys.forEach((name, j) => made.append(drawn("text", { transform: `translate(${left + j * size + size / 2 + 3} ${top - 6}) rotate(-50)` }, short(name, 11))));
    const cursor = drawn("rect", { class: "cursor", width: size - 1, height: size - 1, visibility: "hidden" });
    made.append(cursor);
    reading(made, { matrix, queries, keys, size, left, top, cursor, readout, way });
    return made;
  }

  function lawCell(value, x, y, size, way) {
    const square = drawn("rect", { x, y, width: size - 1, height: size - 1 });
    const shade = Number.isNaN(value) ? 0 : way.shade(value);
    square.style.setProperty("--s", shade.toFixed(3));
    const printed = size < 20 || Number.isNaN(value) ? "" : way.printed(value);
    if (!printed) return [square];
    return [square, drawn("text", { class: shade > DEEP ? "printed deep" : "printed", x: x + size / 2 - 0.5, y: y + size / 2 + 3, "text-anchor": "middle" }, printed)];
  }

  function reading(made, { matrix, queries, keys, size, left, top, cursor, readout, way }) {
    let [i, j] = [0, 0];
    const show = (query, key) => {
      if (!(query >= 0 && query < queries.length && key >= 0 && key < keys.length)) return;
      [i, j] = [query, key];
      fill(cursor, { x: left + j * size, y: top + i * size, visibility: "visible" }, []);
      const value = number(matrix[i][j]);
      readout.replaceChildren("“", element("bdi", {}, queries[i]), `” ${way.verb} “`, element("bdi", {}, keys[j]), `” ${way.after} `, element("b", { class: "number", "data-number": value, "data-kind": way.kind, "data-tip": way.tip }, Number.isNaN(value) ? "–" : way.said(value)));
    };
    made.addEventListener("pointermove", (event) => { const box = made.getBoundingClientRect(); show(Math.floor((event.clientY - box.top - top) / size), Math.floor((event.clientX - box.left - left) / size)); });
    made.addEventListener("keydown", (event) => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (move) { event.preventDefault(); show(i + move[0], j + move[1]); }
    });
    made.addEventListener("focus", () => show(i, j));
  }

  // Tokens as a sentence

  function sentence(names, values, column, marked = []) {
    const shade = scale(values, Math.min(0, ...values.filter(Number.isFinite)));
    return element("ul", { class: "sentence" }, names.map((name, i) => shaded(element("li", { class: "token" }, element("bdi", {}, name), marked.includes(i) ? element("span", { class: "sink", "data-tip": "A sink: it receives a large share of the attention of the layer, or is far longer than the others." }, "sink ") : null, figure(values[i], column, `“${name}”`)), shade.share(values[i]))));
  }

  const INFLUENCE = { title: "influence", meaning: "Norm of the derivative of the mean output token by this token, through the whole network.", kind: "measured" };

  function influenceIn(input, level) {
    const found = table("influence", "", input);
    if (!found || !found.influence) return [];
    const title = level ? [element(level, {}, "Influence of the tokens, through the whole network")] : [];
    const values = found.influence.map(number);
    return [...title, soft("How far the mean output token moves for each unit that a token moves, in the worst direction. A stronger color is more influence."), sentence(tokenNames(input, values.length), values, { ...INFLUENCE, kind: found.kind || INFLUENCE.kind }), ...influenceMap(found, input)];
  }

  function influenceMap(found, input) {
    if (!found.map || !found.map.length) return [];
    const most = Math.max(...found.map.flat().map(number).filter(Number.isFinite), 0);
    const way = {
      shade: (value) => (most > 0 ? Math.sqrt(value / most) : 0), printed: () => "", said: (value) => written(value), verb: "depends on", after: "by", kind: "measured",
      tip: "Frobenius norm of the derivative of this output token by that input token, through the whole network. Measured with 8 random directions of the output: ± 25 %.",
      label: (n, m) => `Influence of ${m} input tokens on ${n} output tokens; arrow keys read the numbers`,
    };
    const readout = element("p", { class: "readout", "aria-live": "polite" }, "Hover over a cell, or use the arrow keys.");
    return [element("h3", {}, "Token by token"), soft("A row is an output token, a column an input token: how strongly the one depends on the other through the whole network. The shade is the square root of the number over the largest. ", kind("measured"), " with 8 random directions of the output: ± 25 %."), scrolling("Influence of tokens on tokens", lawPicture(found.map, readout, input, way)), readout];
  }

  function drawInfluence(box) {
    const place = element("div");
    const those = inputsWith("influence");
    const again = (index) => place.replaceChildren(...influenceIn(index));
    const shares = rows("stack").filter((row) => "influence_share" in row.values).map((row) => paragraph(`${columns.get("influence_share").title}: `, element("b", {}, figure(valueOf(row, "influence_share"), columns.get("influence_share"))), " ", kind(columns.get("influence_share").kind), " ", info(columns.get("influence_share"))));
    if (those.length > 1) box.append(element("div", { class: "controls" }, choice("input", those.map((i) => option(String(i), inputName(i))), String(those[0]), (index) => again(Number(index)))));
    box.append(place, ...shares);
    again(those[0]);
  }

  // A layer

  function layerPanel(layer) {
    const site = sites.find((entry) => entry.layer === layer);
    const row = layers.get(layer);
    const own = [...heads.values()].filter((head) => head.layer === layer);
    if (!site || (!row && !own.length)) return null;
    const open = sites.filter((entry) => layers.has(entry.layer) || heads.has(`${entry.layer}-0`));
    const target = (entry) => entry && [`#layer-${entry.layer}`, entry.site];
    const at = open.indexOf(site);
    const under = soft(`${site.kind}, ${site.heads} heads · row ${layer} of the map`);
    return [
      ...panelHeader(site.site || "the model", under, target(open[at - 1]), target(open[at + 1])),
      ...findingsAt(layer, -1), inputChoice(), ...(row ? numbersOf(row, "layer") : []), ...branches(row), ...headBars(own), ...norms(site), ...deviations(site),
    ].filter(Boolean);
  }

  function bars(entries, sort) {
    const most = Math.max(...entries.map((entry) => entry.value).filter(Number.isFinite), 0);
    const width = (value) => (value === Infinity ? 100 : most > 0 && value > 0 ? (100 * value) / most : 0);
    return element("ul", { class: "bars" }, entries.map((entry) => element("li", {}, entry.label, drawn("svg", { "aria-hidden": "true" }, drawn("rect", { class: `bar ${entry.column.kind === "proved" ? "proved" : "plainly"}`, x: 0.5, y: 1, height: 10, width: `${width(entry.value).toFixed(2)}%` })), figure(entry.value, entry.column, sort))));
  }

  function branches(row) {
    const names = ["layer_constant", "attention_branch_constant", "mlp_branch_constant", "block_constant"].filter((name) => row && name in row.values);
    if (!names.length) return [];
    const input = report.inputs.length > 1 ? state.shown : null;
    return [element("h3", {}, "Attention, MLP and block"), soft("How much each part of the block amplifies a small change of its own input."), bars(names.map((name) => ({ label: columns.get(name).title, value: valueOf(row, name, input), column: columns.get(name) })))];
  }

  function headBars(own) {
    if (!own.length || !state.column) return [];
    const column = columns.get(state.column);
    const entries = own.map((row) => ({ label: element("a", { href: `#head-${row.layer}-${row.head}` }, `head ${row.head}`), value: valueOf(row, column.name), column })).sort((a, b) => (b.value > a.value ? 1 : b.value < a.value ? -1 : 0));
    return [element("h3", {}, `Its heads: ${column.title}`), soft("The quantity is the one that the map of the heads is colored by. ", info(column)), bars(entries)];
  }

  function norms(site) {
    const found = table("geometry", site.site, state.shown);
    if (!found || !found.norms) return [absent("geometry", "Token norms")];
    const values = found.norms.map(number);
    const column = { title: "norm of the token", meaning: "Euclidean norm of the token that enters the layer.", kind: "run" };
    return [element("h3", {}, "Tokens that enter it, by norm"), sentence(tokenNames(state.shown, values.length), values, column, found.sinks || [])];
  }

  function deviations(site) {
    const found = table("one-token", site.site, state.shown);
    if (!found || !found.moves) return [absent("one-token", "Moves of one token")];
    const names = report.inputs[state.shown] ? report.inputs[state.shown].tokens : [];
    const proved = { title: "proved", meaning: "The output of the layer moves by no more than this (Frobenius norm), whatever the direction.", kind: "proved" };
    const attack = { title: "found", meaning: "The farthest that an attack moved the output; the truth is between this and what is proved.", kind: "searched" };
    const points = (name) => found.moves.map((move) => ({ x: move.share, y: number(move[name]), text: `${percent(move.share)} of its norm, ${name}: ${written(number(move[name]), name === "proved" ? "≤" : "≥")}` }));
    const lines = found.moves.map((move) => element("tr", {}, element("th", { scope: "row" }, percent(move.share)), element("td", { class: "right" }, "≤ ", figure(number(move.proved), proved)), element("td", { class: "right" }, "≥ ", figure(number(move.found), attack)), element("td", {}, move.theorem)));
    const title = (text, column) => element("th", { scope: "col", class: "right" }, text, " ", kind(column.kind), " ", info(column));
    const made = element("table", { class: "plain" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "the token moves"), title("proved", proved), title("found", attack), element("th", { scope: "col" }, "theorem"))), element("tbody", {}, lines));
    const norm = { title: "norm of the token", meaning: "Euclidean norm of the token that moves.", kind: "run" };
    return [element("h3", {}, "One token moves"), soft("The token that this layer listens to most, “", element("bdi", {}, names[found.token] === undefined ? String(found.token) : names[found.token]), "”, of norm ", figure(number(found.norm), norm), ", moves by a share of its norm: how far can the output of the layer go?"),
      chart({ x: { log: true, label: "share of the token's norm", every: found.moves.map((move) => move.share), name: percent }, y: { log: true, label: "the output moves by" }, series: [{ name: "found by an attack (searched)", points: points("found") }, { name: "proved", points: points("proved") }], label: "How far the output moves, found and proved, against how far the token moves" }), scrolling("One token moves", made)];
  }

  // Depth and geometry

  function drawDepth(box) {
    const those = inputsWith("depth");
    const place = element("div");
    const again = (index) => place.replaceChildren(...depthOf(index));
    box.append(soft("A constant is the largest singular value of the derivative. Blocks rarely share their worst direction, so the product of their constants, which is how bounds of layers compose, overstates what they do together."));
    box.append(...stackNumbers(["network_constant", "inner_constant", "product"]));
    if (those.length > 1) box.append(element("div", { class: "controls" }, choice("input", those.map((i) => option(String(i), inputName(i))), String(those[0]), (index) => again(Number(index)))));
    box.append(place);
    if (those.length) again(those[0]);
  }

  function stackNumbers(names) {
    const own = names.filter((name) => rows("stack").some((row) => name in row.values));
    if (!own.length) return [];
    const head = element("tr", {}, element("th", { scope: "col" }, "stack"), own.map((name) => element("th", { scope: "col", class: "right" }, columns.get(name).title, " ", kind(columns.get(name).kind), " ", info(columns.get(name)))));
    const lines = rows("stack").map((row) => element("tr", {}, element("th", { scope: "row" }, element("code", {}, row.site || "the model")), own.map((name) => element("td", { class: "right" }, ...(name in row.values ? overInputs(row, columns.get(name)) : ["–"])))));
    return [scrolling("Stacks of blocks", element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, lines)))];
  }

  function depthOf(input) {
    const found = table("depth", "", input);
    return Object.entries((found && found.stacks) || {}).flatMap(([stack, curve]) => depthChart(stack, curve));
  }

  function depthChart(stack, curve) {
    const [alone, soFar] = [curve.blocks.map(number), curve.so_far.map(number)];
    let so = 1;
    const product = alone.map((value) => (so *= value));
    const points = (values, words) => values.map((value, i) => ({ x: i, y: value, text: `${words} ${i}: ${written(value)}` }));
    const series = [{ name: "from the first block to here", points: points(soFar, "after block") }, { name: "the block alone", points: points(alone, "block") }, { name: "product of the blocks so far", points: points(product, "product up to block") }];
    const so_far = { title: "from the first block to here", meaning: "Largest singular value of the derivative of all blocks up to this one.", kind: "measured" };
    const block = { title: "the block alone", meaning: "Largest singular value of the derivative of this block.", kind: "measured" };
    const lines = alone.map((value, i) => element("tr", {}, element("th", { scope: "row" }, String(i)), element("td", { class: "right" }, figure(soFar[i], so_far)), element("td", { class: "right" }, figure(value, block))));
    const head = element("tr", {}, ["block", so_far.title, block.title].map((title, i) => element("th", { scope: "col", class: i ? "right" : null }, title)));
    return [element("h3", {}, element("code", {}, stack || "the model")), chart({ x: { label: "block", every: alone.map((_, i) => i) }, y: { log: true, label: "constant" }, series, label: `Constants of ${stack} by depth` }), fold("The numbers of this plot", scrolling("Constants by depth", element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, lines))))];
  }

  function drawDecision(box) {
    const found = table("radius", "", inputsWith("radius")[0]);
    const spent = found.spent.map((one) => ({ block: one.block + 1, linear: number(one.linear), whole: number(one.linear) + number(one.rest), share: number(one.share) }));
    box.append(...found.sentences.map((sentence) => paragraph(sentence)));
    const typos = found.typos.map((one) => element("tr", {}, element("th", { scope: "row" }, one.word), element("td", { class: "right" }, `${one.changed} of ${one.count}`), element("td", {}, one.examples.map(([typo]) => typo).join(", "))));
    const titles = element("tr", {}, [found.unit, "typos that count", "the largest effects"].map((words, i) => element("th", { scope: "col", class: i === 1 ? "right" : null }, words)));
    if (typos.length) box.append(fold(`Each ${found.unit}`, scrolling(`Typos of each ${found.unit}`, element("table", { class: "plain" }, element("thead", {}, titles), element("tbody", {}, typos)))));
    if (!spent.length) return;
    const points = (of, words) => spent.map((one) => ({ x: one.block, y: of(one), text: `${words} block ${one.block}: ${written(of(one))}` }));
    const series = [{ name: "proved", points: points((one) => one.whole, "proved, after") }, { name: "the derivative alone", points: points((one) => one.linear, "the derivative, after") }];
    const title = { title: "proved", meaning: "All tokens together move by at most this after the block.", kind: "proved" };
    const lines = spent.map((one) => element("tr", {}, element("th", { scope: "row" }, String(one.block)), element("td", { class: "right" }, figure(one.whole, title)), element("td", { class: "right" }, percent(Number(one.share.toPrecision(2))))));
    const head = element("tr", {}, ["block", "proved", "beyond the derivative"].map((words, i) => element("th", { scope: "col", class: i ? "right" : null }, words)));
    box.append(element("h3", {}, "Where the room is used up"), soft(`How far all tokens together can be displaced after each block while the token about which least is proved moves by ${found.kind === "embedding" ? "a thousandth of its length" : "as much as is proved for it"}.`));
    box.append(chart({ x: { label: "block", every: spent.map((one) => one.block) }, y: { zero: true, label: "how far tokens move" }, series, label: "How far tokens move, block by block" }));
    box.append(fold("The numbers of this plot", scrolling("Moves by depth", element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, lines)))));
  }

  function drawGeometry(box) {
    const pairs = [["effective_rank", "How many directions tokens spread in", true], ["mean_cosine", "How much tokens point the same way", true]];
    box.append(soft("Tokens that enter each layer. A falling rank and a rising cosine are rank collapse; sink tokens hide it or fake it, so both curves are drawn."));
    box.append(element("div", { class: "pair" }, pairs.filter(([name]) => columns.has(name) && [...layers.values()].some((row) => name in row.values)).map(([name, title, zero]) => geometryChart(name, title, zero))));
  }

  function geometryChart(name, title, zero) {
    const names = [name, `${name}_without_sinks`].filter((one) => columns.has(one));
    const order = [...layers.values()].sort((a, b) => a.layer - b.layer);
    const series = names.map((one) => ({ name: columns.get(one).title, points: order.map((row) => ({ x: row.layer, y: valueOf(row, one), text: `layer ${row.layer}, ${columns.get(one).title}: ${written(valueOf(row, one))}\n${explained(columns.get(one))}` })) }));
    const head = element("tr", {}, element("th", { scope: "col" }, "layer"), names.map((one) => element("th", { scope: "col", class: "right" }, columns.get(one).title, " ", info(columns.get(one)))));
    const lines = order.map((row) => element("tr", {}, element("th", { scope: "row" }, element("a", { href: `#layer-${row.layer}` }, String(row.layer))), names.map((one) => element("td", { class: "right" }, figure(valueOf(row, one), columns.get(one))))));
    return element("div", {}, element("h3", {}, title), chart({ x: { label: "layer", every: order.map((row) => row.layer) }, y: { label: columns.get(name).title, zero }, series, label: `${title}, by layer` }), fold("The numbers of this plot", scrolling(title, element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, lines)))));
  }

  // Changed words

  const CHANGED = (report.tables.words || []).flatMap((entry) => entry.changes);
  const UNIT = CHANGED.length && CHANGED.every((change) => change.unit === "token") ? "token" : "word"; // residues and atoms are no words
  const CHANGE = {
    kind: { title: "kind", meaning: "", kind: "" },
    word: { title: `${UNIT} → text`, meaning: "", kind: "" },
    enters: { title: "W₁ in", meaning: "Wasserstein distance between the tokens that enter the first block, with and without the change.", kind: "run" },
    leaves: { title: "W₁ out", meaning: "The same for the tokens that leave the last block.", kind: "run" },
    expansion: { title: "expansion", meaning: "W₁ out over W₁ in.", kind: "run" },
    moved: { title: "output moved", meaning: "How far the mean output token went, over its length.", kind: "run" },
    predicted: { title: "predicted", meaning: `${UNIT === "word" ? "The influence of the word: the sum of the influences of its tokens." : "The influence of the token."} It predicts an order, not a distance.`, kind: "measured" },
  };
  const SORTS = ["typo", "replacement", "deletion"];

  const changes = (report.tables.words || []).flatMap((entry) => (entry.followed || []).map((change) => {
    const distances = change.distances.map(number);
    const [enters, leaves] = [distances[0], distances[distances.length - 1]];
    return { ...change, input: entry.input, distances, enters, leaves, expansion: enters > 0 ? leaves / enters : NaN, moved: number(change.moved) / number(change.size), predicted: number(change.predicted) };
  }));

  function drawWords(box) {
    const place = element("div");
    const again = () => place.replaceChildren(...wordsShown(again));
    const those = inputsWith("words");
    state.text = those.length > 1 ? null : those[0];
    if (those.length > 1) box.append(element("div", { class: "controls" }, choice(`${UNIT}s of`, [option("", "all inputs"), ...those.map((i) => option(String(i), inputName(i)))], "", (index) => { state.text = index === "" ? null : Number(index); state.change = null; again(); })));
    box.prepend(soft(`${counted()} W₁ is the Wasserstein distance between the tokens of both texts. Open a ${UNIT} to see it layer by layer.`));
    box.append(place);
    again();
  }

  /* What was changed, counted: not everything has two letters that can change places. */
  function counted() {
    const parts = [["typo", "typos"], ["replacement", `${UNIT}s replaced`], ["deletion", `${UNIT}s left out`]].map(([kind, words]) => `${changes.filter((change) => change.kind === kind).length} ${words}`);
    return `${parts.join(", ")}: one ${UNIT} at a time, in ${inputsWith("words").length} of ${report.inputs.length} inputs.`;
  }

  function sorted(list) {
    const sign = state.descending ? -1 : 1;
    const key = (change) => change[state.sort];
    return [...list].sort((a, b) => (Number.isNaN(key(a)) ? 1 : Number.isNaN(key(b)) ? -1 : key(a) < key(b) ? -sign : key(a) > key(b) ? sign : 0));
  }

  function wordsShown(again) {
    const own = sorted(changes.filter((change) => state.text === null || change.input === state.text));
    if (!own.includes(state.change)) state.change = own[0];
    const pick = (change) => { state.change = change; again(); document.querySelector(".changes [aria-selected=true] .choose").focus({ preventScroll: true }); };
    const scroller = scrolling(`Changed ${UNIT}s`, changeTable(own, pick, again), "changes");
    const before = document.querySelector(".changes");
    if (before) { const [x, y] = [before.scrollLeft, before.scrollTop]; queueMicrotask(() => { scroller.scrollLeft = x; scroller.scrollTop = y; }); }
    return [scroller, element("div", { class: "pair" }, prediction(own, pick), layerByLayer(state.change))];
  }

  function changeTable(own, pick, again) {
    const title = ([name, column]) => {
      const button = element("button", { type: "button", class: "sort", "data-sort": name }, column.title);
      button.addEventListener("click", () => { state.descending = state.sort === name ? !state.descending : true; state.sort = name; again(); document.querySelector(`[data-sort="${name}"]`).focus(); });
      const chosen = state.sort === name;
      return element("th", { scope: "col", class: name === "kind" || name === "word" ? "left" : null, "aria-sort": chosen ? (state.descending ? "descending" : "ascending") : null, "data-tip": column.meaning ? explained(column) : null }, element("span", { class: "arrow", "aria-hidden": "true" }, chosen ? (state.descending ? "↓" : "↑") : ""), button);
    };
    return element("table", { role: "grid" }, element("thead", {}, element("tr", {}, Object.entries(CHANGE).map(title))), element("tbody", {}, own.map((change) => changeRow(change, pick))));
  }

  function changeRow(change, pick) {
    const choose = element("button", { type: "button", class: "choose", "aria-label": `${change.kind} of ${change.word}: layer by layer` }, element("bdi", {}, change.word));
    choose.addEventListener("click", () => pick(change));
    const numbers = ["enters", "leaves", "expansion", "moved", "predicted"].map((name) => element("td", { class: name === "expansion" || name === "moved" ? "derived" : null }, figure(change[name], CHANGE[name], `${change.kind} of “${change.word}”`)));
    return element("tr", { "aria-selected": String(change === state.change) }, element("td", { class: "left" }, change.kind), element("td", { class: "left", "data-tip": change.text }, choose, " → ", element("bdi", {}, ...changed(change))), numbers);
  }

  /* A changed text near its change, which is marked; a word that is left out is struck through. */
  function changed(change) {
    const [before, after] = [[...(report.inputs[change.input]?.name || "")], [...change.text]];
    const [start, end] = between(before, after, change.kind === "deletion");
    const [left, right] = [Math.max(0, start - 14), Math.min(after.length, end + 14)];
    const middle = start < end ? element("mark", {}, after.slice(start, end).join("")) : element("del", {}, ` ${change.word}`);
    return [`${left ? "…" : ""}${after.slice(left, start).join("")}`, middle, `${after.slice(end, right).join("")}${right < after.length ? "…" : ""}`];
  }

  /* From where to where a text differs from the one before; whole words, unless nothing was put in. */
  function between(before, after, nothing) {
    const most = Math.min(before.length, after.length);
    let [start, end] = [0, 0];
    while (start < most && before[start] === after[start]) start += 1;
    while (end < most - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end += 1;
    if (nothing) return [Math.min(start, after.length - end), Math.min(start, after.length - end)];
    const inside = (at) => at >= 0 && at < after.length && /[\p{L}\p{N}]/u.test(after[at]);
    while (inside(start - 1)) start -= 1;
    while (end > 0 && inside(after.length - end)) end -= 1;
    return [start, after.length - end];
  }

  function prediction(own, pick) {
    const series = SORTS.map((name) => ({ name, points: own.filter((change) => change.kind === name).map((change) => ({ x: change.predicted, y: change.moved, chosen: change === state.change, pick: () => pick(change), text: `${name} of “${change.word}”\npredicted ${written(change.predicted)}, moved ${written(change.moved)}` })) }));
    const found = rows("stack").flatMap((row) => SORTS.map((name) => `${name}_correlation`).filter((name) => name in row.values).map((name) => [row, columns.get(name)]));
    const input = report.inputs.length > 1 ? state.text : null;
    const correlations = found.map(([row, column]) => element("li", {}, `${column.title}: `, element("b", {}, figure(valueOf(row, column.name, input), column)), " ", info(column)));
    return element("div", {}, element("h3", {}, "Does influence predict it?"), chart({ x: { label: `influence of the ${UNIT}`, zero: true }, y: { label: "output moved", zero: true }, series, lines: false, label: `How far the output moved against the influence of the ${UNIT}` }), correlations.length ? [soft(`Rank correlations ${input === null && report.inputs.length > 1 ? "(means over inputs)" : ""}`), element("ul", { class: "series" }, correlations)] : null);
  }

  function layerByLayer(change) {
    if (!change) return null;
    const last = change.distances.length - 1;
    const points = change.distances.map((value, i) => ({ x: i, y: value, text: `${i === last ? "leaving the last block" : `entering block ${i}`}: W₁ ${written(value)}` }));
    const column = { title: "W₁", meaning: "Wasserstein distance between the tokens of both texts.", kind: "run" };
    const lines = change.distances.map((value, i) => element("tr", {}, element("th", { scope: "row" }, i === last ? "out" : String(i)), element("td", { class: "right" }, figure(value, column))));
    return element("div", {}, element("h3", {}, "Layer by layer"), soft(`${change.kind} of “`, element("bdi", {}, change.word), "”: ", element("bdi", {}, change.text)), chart({ x: { label: "entering block", every: change.distances.map((_, i) => i), name: (i) => (i === last ? "out" : String(i)) }, y: { label: "W₁ between the tokens", zero: true }, series: [{ name: "W₁", points }], label: "Wasserstein distance layer by layer" }), fold("The numbers of this plot", scrolling("W₁ by layer", element("table", { class: "plain" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "entering block"), element("th", { scope: "col", class: "right" }, "W₁"))), element("tbody", {}, lines)))));
  }

  // What a number is: shown where one points, tabs or taps

  let tipped = null;

  function showTip(event) {
    tipped = event.target.closest?.("[data-tip]") || null;
    if (!tipped) return hideTip();
    tip.textContent = tipped.getAttribute("data-tip");
    (panel.open ? panel : document.body).append(tip);
    tip.hidden = false;
    placeTip();
  }

  function placeTip() {
    const target = tipped;
    const [box, own] = [target.getBoundingClientRect(), tip.getBoundingClientRect()];
    const below = box.bottom + 8 + own.height < innerHeight;
    tip.style.top = `${below ? box.bottom + 8 : Math.max(4, box.top - own.height - 8)}px`;
    tip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8))}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  function scrolled() {
    if (tip.hidden) return;
    if (tipped === document.activeElement) placeTip(); // focus scrolls what it finds into view
    else hideTip();
  }

  function start() {
    if (known("head").length && heads.size) drawHeads(opened("heads"));
    else if (layers.size && known("layer").length) drawLayersAlone(opened("heads"));
    if (inputsWith("depth").length || rows("stack").some((row) => "network_constant" in row.values)) drawDepth(opened("depth"));
    if (inputsWith("radius").length) drawDecision(opened("radius"));
    if ([...layers.values()].some((row) => "effective_rank" in row.values || "mean_cosine" in row.values)) drawGeometry(opened("geometry"));
    if (inputsWith("influence").length) drawInfluence(opened("influence"));
    if (changes.length) drawWords(opened("words"));
  }

  function drawLayersAlone(box) {
    const own = known("layer");
    const head = element("tr", {}, element("th", { scope: "col" }, "layer"), own.map((column) => element("th", { scope: "col", class: "right" }, column.title, " ", info(column))));
    const lines = [...layers.values()].map((row) => element("tr", {}, element("th", { scope: "row" }, element("a", { href: `#layer-${row.layer}` }, String(row.layer))), own.map((column) => element("td", { class: "right" }, figure(valueOf(row, column.name), column)))));
    document.getElementById("heads-title").textContent = "Every layer";
    box.append(scrolling("Layers", element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, lines))));
  }

  panel.addEventListener("close", () => { if (PLACE.test(location.hash)) close(); }); // Escape closes a dialog by itself
  panel.addEventListener("click", (event) => { if (event.target === panel && event.clientX < panel.getBoundingClientRect().left) close(); });
  document.addEventListener("pointerover", showTip);
  document.addEventListener("focusin", showTip);
  document.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", scrolled, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("hashchange", route);
  start();
  route();
})();
