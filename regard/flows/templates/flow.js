"use strict";
(() => {
  const flow = JSON.parse(document.getElementById("flow").textContent);
  const stage = document.getElementById("stage");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const LEVELS = 32767;
  const LASTS = 12; // seconds that a whole flow plays at speed one
  const state = { at: 0, playing: false, chosen: 0, speed: 1, yaw: 0.6, pitch: 0.35 };

  // Elements: texts become text nodes, never markup

  function fill(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  }
  const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const drawn = (name, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (value === "inf" ? Infinity : typeof value === "number" ? value : NaN);

  function written(value) {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : "∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
    const size = Math.abs(value);
    return (size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : String(Number(value.toPrecision(4)))).replace("-", "−");
  }

  // Frames

  function bytes(text) {
    const plain = atob(text);
    const found = new Uint8Array(plain.length);
    for (let i = 0; i < plain.length; i++) found[i] = plain.charCodeAt(i);
    return found;
  }

  function numbers(panel, index) {
    panel.decoded ||= [];
    panel.decoded[index] ||= panel.cells ? bytes(panel.frames[index]) : new Int16Array(bytes(panel.frames[index]).buffer);
    return panel.decoded[index];
  }

  function between(panel, at) {
    // the frame before, the one after, and the share of the latter
    const last = panel.frames.length - 1;
    const low = Math.min(Math.floor(at), last);
    const high = Math.min(low + 1, last);
    const [a, b] = [numbers(panel, low), numbers(panel, high)];
    return a.length === b.length ? [a, b, Math.min(at, last) - low] : [a, a, 0];
  }

  // Pictures

  function prepared(canvas) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const side = Math.max(80, Math.round(canvas.clientWidth * ratio));
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const brush = canvas.getContext("2d");
    brush.setTransform(1, 0, 0, 1, 0, 0);
    brush.clearRect(0, 0, side, side);
    brush.translate(side / 2, side / 2);
    return [brush, side / 2, ratio];
  }

  function outline(brush, radius) {
    brush.globalAlpha = 1;
    brush.strokeStyle = color("--line");
    brush.lineWidth = 1.5;
    brush.beginPath();
    brush.arc(0, 0, radius, 0, 2 * Math.PI);
    brush.stroke();
  }

  function dot(brush, x, y, radius) {
    brush.beginPath();
    brush.arc(x, y, radius, 0, 2 * Math.PI);
    brush.fill();
  }

  function flat(panel, brush, half, ratio, at) {
    const [a, b, share] = between(panel, at);
    const count = a.length / panel.width;
    const reach = (panel.view === "plane" ? 0.9 : 0.82) * half;
    if (panel.view === "plane") cross(brush, reach);
    else outline(brush, reach);
    brush.fillStyle = color("--accent");
    brush.globalAlpha = count > 400 ? 0.35 : 0.6;
    for (let i = 0; i < a.length; i += 3) {
      const [x, y, size] = [0, 1, 2].map((k) => (a[i + k] + share * (b[i + k] - a[i + k])) / LEVELS);
      dot(brush, reach * x, -reach * y, ratio * (1.5 + 3 * Math.sqrt(Math.max(size, 0))) * (count > 400 ? 0.6 : 0.8));
    }
    brush.globalAlpha = 1;
  }

  function cross(brush, reach) {
    brush.strokeStyle = color("--line");
    brush.lineWidth = 1;
    brush.beginPath();
    for (const [x, y] of [[1, 0], [0, 1]]) {
      brush.moveTo(-reach * x, -reach * y);
      brush.lineTo(reach * x, reach * y);
    }
    brush.stroke();
  }

  function ring(panel, brush, half, ratio, at) {
    const [a, b, share] = between(panel, at);
    const [inner, high] = [0.42 * half, 0.52 * half];
    outline(brush, inner);
    brush.beginPath();
    for (let i = 0; i <= a.length; i++) {
      const k = i % a.length;
      const radius = inner + high * (a[k] + share * (b[k] - a[k])) / 255;
      const angle = 2 * Math.PI * ((i + 0.5) / a.length - 0.5);
      brush.lineTo(radius * Math.cos(angle), -radius * Math.sin(angle));
    }
    brush.closePath();
    brush.moveTo(inner, 0);
    brush.arc(0, 0, inner, 0, 2 * Math.PI);
    brush.fillStyle = color("--accent");
    brush.globalAlpha = 0.85;
    brush.fill("evenodd");
    brush.globalAlpha = 1;
  }

  function turned(x, y, z) {
    // by yaw about the axis, then by pitch: right, up, towards the reader
    const [c, s] = [Math.cos(state.yaw), Math.sin(state.yaw)];
    const [e, t] = [Math.cos(state.pitch), Math.sin(state.pitch)];
    const [right, depth] = [c * x - s * y, s * x + c * y];
    return [right, e * z + t * depth, t * z - e * depth];
  }

  function globe(panel, brush, half, ratio, at) {
    const [a, b, share] = between(panel, at);
    const reach = 0.88 * half;
    outline(brush, reach);
    brush.fillStyle = color("--accent");
    const few = a.length / 4 <= 400;
    for (const front of [false, true]) {
      brush.globalAlpha = front ? (few ? 0.8 : 0.5) : 0.15;
      for (let i = 0; i < a.length; i += 4) {
        const [x, y, z, size] = [0, 1, 2, 3].map((k) => (a[i + k] + share * (b[i + k] - a[i + k])) / LEVELS);
        const [right, up, near] = turned(x, y, z);
        if (near > 0 === front) dot(brush, reach * right, -reach * up, ratio * (few ? 1 : 0.7) * (1.2 + 2.6 * Math.sqrt(Math.max(size, 0))));
      }
    }
    brush.globalAlpha = 1;
  }

  function channels(name) {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = color(name);
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  }

  function shell(panel, brush, half, ratio, at) {
    const [a, b, share] = between(panel, at);
    const [rows, columns] = panel.cells;
    const side = Math.min(320, Math.round(2 * half));
    const image = new ImageData(side, side);
    const [low, high, top] = [channels("--low"), channels("--accent"), Math.log1p(rows * columns)];
    const [c, s, e, t] = [Math.cos(state.yaw), Math.sin(state.yaw), Math.cos(state.pitch), Math.sin(state.pitch)];
    for (let v = 0; v < side; v++) {
      for (let u = 0; u < side; u++) {
        const [right, up] = [(2 * (u + 0.5) / side - 1) / 0.88, (1 - 2 * (v + 0.5) / side) / 0.88];
        const rest = 1 - right * right - up * up;
        if (rest < 0) continue;
        const near = Math.sqrt(rest);
        const [z, depth] = [e * up + t * near, t * up - e * near];
        const [x, y] = [c * right + s * depth, -s * right + c * depth];
        const row = Math.min(rows - 1, Math.floor(((z + 1) / 2) * rows));
        const column = Math.min(columns - 1, Math.floor((Math.atan2(y, x) / (2 * Math.PI) + 0.5) * columns));
        const k = row * columns + column;
        const density = Math.expm1(((a[k] + share * (b[k] - a[k])) / 255) * top);
        const level = density / (density + 4);
        const place = 4 * (v * side + u);
        for (let i = 0; i < 3; i++) image.data[place + i] = low[i] + level * (high[i] - low[i]);
        image.data[place + 3] = 255;
      }
    }
    const sheet = document.createElement("canvas");
    sheet.width = sheet.height = side;
    sheet.getContext("2d").putImageData(image, 0, 0);
    brush.drawImage(sheet, -half, -half, 2 * half, 2 * half);
    outline(brush, 0.88 * half);
  }

  function paint(panel) {
    const how = panel.view === "globe" ? (panel.cells ? shell : globe) : panel.cells ? ring : flat;
    how(panel, ...prepared(panel.canvas), state.at);
    const last = panel.frames.length - 1;
    const index = Math.min(Math.round(state.at), last);
    const counted = flow.columns.filter((column) => ["clusters", "dense regions"].includes(column.name));
    panel.caption.textContent = counted.map((column) => counting(number(panel.values[column.name][index]), column.name)).join(", ");
  }

  const counting = (count, name) => `${written(count)} ${count === 1 ? name.slice(0, -1) : name}`;

  // Charts

  const [WIDE, TALL, LEFT, BELOW] = [420, 130, 44, 20];

  function scaled(column, values) {
    const good = values.filter(Number.isFinite);
    const bend = column.logarithmic ? (v) => Math.log10(Math.max(v, 1)) : (v) => v;
    let [low, high] = [Math.min(...good.map(bend)), Math.max(...good.map(bend))];
    if (!good.length) [low, high] = [0, 1];
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) [low, high] = [low - 0.5, high + 0.5];
    const y = (v) => TALL - BELOW - ((bend(v) - low) / (high - low)) * (TALL - BELOW - 8);
    return [y, [low, high].map((v) => (column.logarithmic ? 10 ** v : v))];
  }

  const when = (index) => LEFT + (index / Math.max(1, flow.times.length - 1)) * (WIDE - LEFT - 8);

  function graph(column) {
    const all = flow.panels.flatMap((panel) => panel.values[column.name].map(number));
    const [y, ends] = scaled(column, all);
    const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": `${column.name} over ${unit()}. ${column.meaning}` });
    for (const end of ends) {
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: WIDE - 8, y1: y(end), y2: y(end) }));
      svg.append(drawn("text", { x: LEFT - 6, y: y(end) + 4, "text-anchor": "end" }, written(Number(end.toPrecision(3)))));
    }
    svg.append(drawn("text", { x: LEFT, y: TALL - 4 }, written(flow.times[0])), drawn("text", { x: WIDE - 8, y: TALL - 4, "text-anchor": "end" }, `${unit()} ${written(flow.times.at(-1))}`));
    const lines = flow.panels.map((panel) => drawn("polyline", { points: panel.values[column.name].map((v, i) => [when(i), y(number(v))]).filter(([, v]) => Number.isFinite(v)).map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }));
    const cursor = drawn("line", { class: "cursor", y1: 4, y2: TALL - BELOW });
    const mark = drawn("circle", { class: "dot", r: 4 });
    svg.append(...lines, cursor, mark);
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      move((((event.clientX - box.left) / box.width) * WIDE - LEFT) / (WIDE - LEFT - 8) * (flow.times.length - 1));
    });
    const value = element("span", { class: "number" });
    const made = element("figure", { class: "graph", title: column.meaning }, element("figcaption", {}, element("b", {}, column.name), value), svg);
    return {
      made,
      update() {
        const panel = flow.panels[state.chosen];
        const index = Math.min(Math.round(state.at), panel.frames.length - 1);
        const here = number(panel.values[column.name][index]);
        lines.forEach((line, i) => line.setAttribute("class", i === state.chosen ? "chosen" : "other"));
        svg.insertBefore(lines[state.chosen], cursor);
        for (const name of ["x1", "x2"]) cursor.setAttribute(name, when(state.at));
        mark.setAttribute("cx", when(index));
        mark.setAttribute("cy", Number.isFinite(here) ? y(here) : -99);
        value.textContent = written(here);
      },
    };
  }

  const unit = () => (flow.kind === "layers" ? "step" : "t =");

  // The table and the text

  function table() {
    const place = document.getElementById("table");
    const panel = flow.panels[state.chosen];
    const head = element("tr", {}, element("th", { scope: "col" }, flow.kind === "layers" ? "step" : "time"), flow.columns.map((column) => element("th", { scope: "col", title: column.meaning }, column.name)));
    const rows = panel.frames.map((_, i) => element("tr", {}, element("th", { scope: "row" }, written(flow.times[i])), flow.columns.map((column) => element("td", { class: "number" }, written(number(panel.values[column.name][i]))))));
    place.replaceChildren(
      element("p", { class: "soft" }, panel.path ? `${panel.name}: ${panel.path}` : panel.name),
      element("div", { class: "scroll numbers-table", tabindex: 0, role: "region", "aria-label": "Numbers" }, element("table", {}, element("thead", {}, head), element("tbody", {}, rows))),
    );
    return rows;
  }

  let rows = [];
  let items = [];

  function tokens() {
    const place = document.getElementById("tokens");
    if (!place) return;
    items = flow.tokens.map((token) => element("li", {}, element("bdi", {}, token), element("sub")));
    place.replaceChildren(...items);
  }

  function cluster() {
    const panel = flow.panels[state.chosen];
    if (!items.length || !panel.labels.length) return;
    const index = Math.min(Math.round(state.at), panel.labels.length - 1);
    const labels = panel.labels[index];
    const counts = labels.reduce((found, label) => found.set(label, (found.get(label) || 0) + 1), new Map());
    items.forEach((item, i) => {
      const shared = counts.get(labels[i]) > 1;
      item.className = shared ? `c${Math.min(labels[i], 3)}` : "alone";
      item.lastChild.textContent = shared ? labels[i] + 1 : "";
    });
    document.getElementById("text-words").textContent = `${panel.name}, step ${index}: tokens with one number are one cluster; 1 is the largest. Tokens without a number are alone.`;
  }

  // Time

  let charts = [];
  let scrub, time, button;

  function move(at) {
    state.at = Math.max(0, Math.min(flow.times.length - 1, at));
    update();
  }

  function update() {
    flow.panels.forEach(paint);
    charts.forEach((chart) => chart.update());
    const index = Math.round(state.at);
    scrub.value = state.at;
    const label = flow.kind === "layers" ? `step ${index}` : `t = ${written(Number(flow.times[index].toPrecision(4)))}`;
    scrub.setAttribute("aria-valuetext", label);
    time.textContent = label;
    rows.forEach((row, i) => row.classList.toggle("now", i === Math.min(index, rows.length - 1)));
    cluster();
  }

  function choose(index) {
    state.chosen = (index + flow.panels.length) % flow.panels.length;
    flow.panels.forEach((panel, i) => flow.panels.length > 1 && panel.box.setAttribute("aria-pressed", i === state.chosen));
    rows = table();
    update();
  }

  function play(on) {
    state.playing = on;
    if (on && state.at >= flow.times.length - 1) state.at = 0;
    button.textContent = on ? "Pause" : "Play";
    button.setAttribute("aria-pressed", on);
    if (on) requestAnimationFrame((now) => tick(now, now));
  }

  function tick(now, before) {
    if (!state.playing) return;
    const last = flow.times.length - 1;
    if (!still.matches && flow.panels.length === 1) state.yaw += ((now - before) / 1000) * 0.15;
    move(state.at + ((now - before) / 1000) * (last / LASTS) * state.speed);
    if (state.at >= last) play(false);
    else requestAnimationFrame((next) => tick(next, now));
  }

  function pressed(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select, .numbers-table")) return;
    const actions = {
      " ": () => (event.target.matches("button, summary") ? null : play(!state.playing)),
      ArrowRight: () => move(Math.floor(state.at) + 1),
      ArrowLeft: () => move(Math.ceil(state.at) - 1),
      Home: () => move(0),
      End: () => move(flow.times.length - 1),
      ArrowUp: () => (flow.panels.length > 1 ? choose(state.chosen - 1) : null),
      ArrowDown: () => (flow.panels.length > 1 ? choose(state.chosen + 1) : null),
    };
    const found = actions[event.key];
    if (!found || found() === null) return;
    event.preventDefault();
  }

  function drag(panel) {
    let from = null;
    panel.canvas.addEventListener("pointerdown", (event) => {
      from = [event.clientX, event.clientY];
      panel.canvas.setPointerCapture(event.pointerId);
    });
    panel.canvas.addEventListener("pointermove", (event) => {
      if (!from) return;
      state.yaw += (event.clientX - from[0]) / 120;
      state.pitch = Math.max(-1.5, Math.min(1.5, state.pitch + (event.clientY - from[1]) / 120));
      from = [event.clientX, event.clientY];
      update();
    });
    for (const name of ["pointerup", "pointercancel"]) panel.canvas.addEventListener(name, () => (from = null));
  }

  function panelled(panel, index) {
    const many = flow.panels.length > 1;
    panel.canvas = element("canvas", { role: "img", "aria-label": `${panel.name}: ${panel.cells ? "density of particles" : "particles"}, ${panel.view}` });
    panel.caption = element("small");
    panel.box = element(many ? "button" : "div", { class: `panel ${panel.view === "globe" ? "turns" : ""}`, type: many ? "button" : null }, panel.canvas, element("span", { class: "caption" }, element("b", {}, panel.name), panel.caption, panel.note ? element("small", {}, panel.note) : null));
    if (many) panel.box.addEventListener("click", () => choose(index));
    if (panel.view === "globe") drag(panel);
    return panel.box;
  }

  function transport() {
    button = element("button", { type: "button", class: "button", "aria-pressed": false }, "Play");
    button.addEventListener("click", () => play(!state.playing));
    scrub = element("input", { type: "range", min: 0, max: flow.times.length - 1, step: "any", value: 0, "aria-label": flow.kind === "layers" ? "Step" : "Time" });
    scrub.addEventListener("input", () => {
      play(false);
      move(Number(scrub.value));
    });
    time = element("output");
    const speeds = [0.25, 0.5, 1, 2, 4].map((value) => element("option", { value }, `${value}×`));
    const select = element("select", {}, speeds);
    select.value = 1;
    select.addEventListener("change", () => (state.speed = Number(select.value)));
    const keys = [["space", "plays"], ["←", ""], ["→", "step"], ...(flow.panels.length > 1 ? [["↑", ""], ["↓", "choose a layer"]] : []), ...(flow.panels[0].view === "globe" ? [["drag", "turns"]] : [])];
    const words = keys.flatMap(([key, what], i) => [element("kbd", {}, key), ` ${what}${what && i < keys.length - 1 ? " · " : ""}`]);
    return element("div", { class: "transport" }, button, scrub, time, element("label", {}, "speed ", select), element("p", { class: "keys" }, words));
  }

  function show() {
    const many = flow.panels.length > 1 || flow.kind === "layers";
    charts = flow.columns.map(graph);
    const panels = element("div", { class: "panels" }, flow.panels.map(panelled));
    const bar = transport();
    const left = many ? [panels, bar] : [element("div", {}, panels, bar)];
    stage.append(element("div", { class: `stage ${many ? "many" : ""}` }, left, element("div", { class: "charts" }, charts.map((chart) => chart.made))));
    tokens();
    choose(0);
    document.addEventListener("keydown", pressed);
    addEventListener("resize", update);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
    const asked = /^#at-(\d+)$/.exec(location.hash); // flow.html#at-30 is frame 30, at rest
    if (asked) move(Number(asked[1]));
    else if (!still.matches && !navigator.webdriver) play(true);
  }

  // The phase diagram

  function diagram() {
    const SIDE = [560, 460];
    const [left, below] = [56, 44];
    const vertical = flow.axis === "beta" ? flow.beta : flow.gamma;
    const factor = vertical[0] / flow.gamma[0];
    const [columns, levels] = [flow.rho.length, vertical.length];
    const [cw, ch] = [(SIDE[0] - left) / columns, (SIDE[1] - below) / levels];
    const step = [flow.rho[1] - flow.rho[0], vertical[1] - vertical[0]];
    const x = (rho) => left + ((rho - flow.rho[0]) / step[0] + 0.5) * cw;
    const y = (v) => SIDE[1] - below - ((v - vertical[0]) / step[1] + 0.5) * ch;
    const name = flow.axis === "beta" ? "β" : "γ = β / log n";
    const kinds = { share: "share of the way to one point", own: "weight of a token on itself at the start" };
    const readout = element("p", { class: "readout soft", "aria-live": "polite" }, "Hover over a cell to read it.");
    const svg = drawn("svg", { viewBox: `0 0 ${SIDE[0]} ${SIDE[1]}`, role: "img", "aria-label": `Phase diagram: ${name} against the initial cosine, with the predicted transition` });
    const cells = [];
    for (let i = 0; i < levels; i++) {
      for (let j = 0; j < columns; j++) {
        const made = drawn("rect", { class: "at", x: (left + j * cw).toFixed(2), y: (SIDE[1] - below - (i + 1) * ch).toFixed(2), width: (cw + 0.3).toFixed(2), height: (ch + 0.3).toFixed(2) });
        made.addEventListener("pointerenter", () => (readout.textContent = `ρ = ${written(flow.rho[j])}, ${flow.axis === "beta" ? "β" : "γ"} = ${written(vertical[i])}: ${kinds[kind]} ${written(flow[kind][i][j])}`));
        cells.push([made, i, j]);
        svg.append(made);
      }
    }
    const path = (points) => points.filter(([, v]) => v >= vertical[0] - step[1] / 2 && v <= vertical.at(-1) + step[1] / 2).map(([r, v]) => `${x(r).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
    const fine = Array.from({ length: 400 }, (_, k) => flow.rho[0] + (k / 399) * (flow.rho.at(-1) - flow.rho[0]));
    const predicted = path(fine.map((rho) => [rho, factor / (1 - rho)]));
    const corrected = path(flow.rho.map((rho, j) => [rho, factor * flow.corrected[j]]));
    svg.append(drawn("polyline", { class: "halo", points: predicted }), drawn("polyline", { class: "predicted", points: predicted }));
    svg.append(drawn("polyline", { class: "halo", points: corrected }), drawn("polyline", { class: "corrected", points: corrected }));
    for (const rho of [0, 0.2, 0.4, 0.6, 0.8]) svg.append(drawn("text", { x: x(rho), y: SIDE[1] - below + 18, "text-anchor": "middle" }, String(rho)));
    const top = vertical.at(-1) + step[1] / 2;
    for (let k = 0; k <= 4; k++) svg.append(drawn("text", { x: left - 8, y: y((k * top) / 4) + 4, "text-anchor": "end" }, written(Number(((k * top) / 4).toPrecision(3)))));
    svg.append(drawn("text", { x: (left + SIDE[0]) / 2, y: SIDE[1] - 6, "text-anchor": "middle" }, "cosine ρ at the start"));
    svg.append(drawn("text", { x: 14, y: (SIDE[1] - below) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(SIDE[1] - below) / 2})` }, name));
    let kind = "share";
    const color_all = () => cells.forEach(([made, i, j]) => made.style.setProperty("--s", flow[kind][i][j].toFixed(3)));
    const select = element("select", {}, Object.entries(kinds).map(([value, text]) => element("option", { value }, text)));
    select.addEventListener("change", () => {
      kind = select.value;
      color_all();
    });
    color_all();
    const line = (name) => drawn("svg", { width: 34, height: 12, viewBox: "0 0 34 12", "aria-hidden": true }, drawn("line", { class: name, x1: 0, x2: 34, y1: 6, y2: 6 }));
    stage.append(
      element("div", { class: "controls" }, element("label", {}, "color", select)),
      element("figure", { class: "diagram chart" }, svg),
      element("ul", { class: "series" }, element("li", {}, line("predicted"), "predicted transition, n → ∞: γ = 1/(1 − ρ)"), element("li", {}, line("corrected"), "predicted at this n and t, to first order")),
      element("div", { class: "ramp" }, "0", element("i"), "1"),
      readout,
    );
    const every = Math.ceil(columns / 10);
    const some = [...Array(columns).keys()].filter((j) => j % every === 0);
    const head = element("tr", {}, element("th", { scope: "col" }, name), some.map((j) => element("th", { scope: "col" }, `ρ = ${written(Number(flow.rho[j].toPrecision(3)))}`)));
    const lines = vertical.map((v, i) => element("tr", {}, element("th", { scope: "row" }, written(Number(v.toPrecision(3)))), some.map((j) => element("td", { class: "number" }, flow.share[i][j].toFixed(3)))));
    document.getElementById("table").replaceChildren(element("p", { class: "soft" }, "Share of the way to one point; some columns, all are in flow.json."), element("div", { class: "scroll numbers-table", tabindex: 0, role: "region", "aria-label": "Numbers" }, element("table", {}, element("thead", {}, head), element("tbody", {}, lines))));
  }

  if (flow.kind === "phase") diagram();
  else show();
})();
