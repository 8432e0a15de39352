"use strict";
// Zoom and hover for the time axis and the curves. The page can be read without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  data.length = data.length || 1;
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const SVG = "http://www.w3.org/2000/svg";
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const KEY = `zoom ${location.pathname}`;
  const strip = document.querySelector(".strip");
  const plots = all(".plot");
  let from = 0, to = 1;  // What is shown, as shares of the run.

  for (const element of all(".zoom")) element.hidden = false;

  // Zoom.

  function words(seconds) {
    if (seconds < 60) return `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    for (const [unit, length, lower, low] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
      if (seconds >= length) {
        const rest = Math.floor(seconds % length / low);
        return `${Math.floor(seconds / length)} ${unit}${rest ? ` ${rest} ${lower}` : ""}`;
      }
    }
    return "0";
  }

  function show(start, end) {
    const width = Math.min(1, Math.max(end - start, Math.min(1, 0.5 / data.length)));
    from = Math.min(Math.max(0, start), 1 - width);
    to = from + width;
    for (const view of all("svg.view")) {
      const height = view.viewBox.baseVal.height;
      view.setAttribute("viewBox", `${from * 1000} 0 ${width * 1000} ${height}`);
    }
    for (const mark of all(".mark")) {
      const x = (mark.dataset.x / 100 - from) / width;
      mark.querySelector("svg").setAttribute("x", `${x * 100}%`);
      mark.style.display = x < -0.001 || x > 1.001 ? "none" : "";
    }
    lanes();
    all(".axis").forEach((each) => axis(each, width));
    remember();
  }

  function lanes() {  // Marks that are close to each other are one above the other.
    const svg = document.querySelector(".marks"), width = svg.getBoundingClientRect().width;
    const ends = [];
    for (const mark of all(".mark").filter((each) => each.style.display !== "none")) {
      const inner = mark.querySelector("svg"), x = parseFloat(inner.getAttribute("x")) / 100 * width;
      let lane = ends.findIndex((end) => x - end >= 18);
      if (lane < 0) lane = Math.min(ends.length, 5);
      ends[lane] = x;
      inner.setAttribute("y", lane * 18 + 14);
    }
    const height = Math.max(1, ends.length) * 18 + 10;
    svg.setAttribute("height", height);
    document.querySelector(".lane svg").setAttribute("height", height);
  }

  function axis(svg, width) {
    const room = Math.max(2, Math.floor(svg.getBoundingClientRect().width / 96));
    const longest = STEPS[STEPS.length - 1], seconds = width * data.length;
    const step = STEPS.find((each) => seconds / each <= room) || Math.ceil(seconds / room / longest) * longest;
    svg.replaceChildren();
    for (let at = Math.ceil(from * data.length / step) * step; at <= to * data.length; at += step) {
      const share = (at / data.length - from) / width, x = `${share * 100}%`;
      const line = svg.appendChild(document.createElementNS(SVG, "line"));
      line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("y2", 5);
      const text = svg.appendChild(document.createElementNS(SVG, "text"));
      text.setAttribute("x", x); text.setAttribute("y", 17);
      text.setAttribute("text-anchor", share < 0.06 ? "start" : share > 0.94 ? "end" : "middle");
      text.textContent = at ? words(at) : "0";
    }
  }

  function zoom(factor, around = (from + to) / 2) {
    show(around - (around - from) * factor, around + (to - around) * factor);
  }
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const ZOOMS = { in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, 1), left: () => move(-0.25), right: () => move(0.25) };
  for (const button of all("[data-zoom]")) button.addEventListener("click", ZOOMS[button.dataset.zoom]);

  // Hover, and drag to zoom.

  function share(plot, event) {
    const box = plot.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / (box.width || 1)));
  }
  function cursors(x) {
    for (const line of all(".cursor line")) {
      line.toggleAttribute("hidden", x === null);
      if (x !== null) { line.setAttribute("x1", `${x * 100}%`); line.setAttribute("x2", `${x * 100}%`); }
    }
  }
  function range(first, second) {
    for (const rect of all(".cursor rect")) {
      rect.toggleAttribute("hidden", first === null);
      if (first !== null) {
        rect.setAttribute("x", `${Math.min(first, second) * 100}%`);
        rect.setAttribute("width", `${Math.abs(first - second) * 100}%`);
      }
    }
  }
  const figure = (value) => value > 0 && value < 0.001 ? "under 0.001" : Math.abs(value) >= 100 ? Math.round(value).toString() : `${+value.toPrecision(3)}`;
  function read(x) {
    const at = from + x * (to - from);
    const seconds = at * data.length;
    const attempt = data.attempts.findIndex(([start, end]) => seconds >= start && seconds <= end);
    const clock = new Date((data.start + seconds) * 1000).toLocaleTimeString();
    document.getElementById("at").textContent = `${words(seconds)} (${clock})${attempt >= 0 ? `, attempt ${attempt}` : ""}`;
    all("figure").forEach((element) => {
      const chart = data.charts[element.dataset.chart];
      const step = Math.min(chart.mid.length - 1, Math.floor(at * chart.mid.length));
      const out = element.querySelector(".read");
      out.dataset.summary ??= out.textContent;
      out.textContent = chart.mid[step] === null ? "no sample" : figure(chart.mid[step]) + spread(chart, step);
    });
  }
  function spread(chart, step) {
    const [low, high] = [chart.low[step], chart.high[step]];
    if (low === high) return "";
    const whose = (places) => chart.names ? ` ${chart.names[places[step]]}` : "";
    return ` (${figure(low)}${whose(chart.lowOf)} to ${figure(high)}${whose(chart.highOf)})`;
  }
  function leave() {
    cursors(null);
    document.getElementById("at").textContent = "";
    for (const out of all(".read")) if (out.dataset.summary !== undefined) out.textContent = out.dataset.summary;
  }
  for (const plot of plots) {
    let pressed = null;
    plot.addEventListener("pointermove", (event) => {
      const x = share(plot, event);
      cursors(x);
      read(x);
      if (pressed !== null) range(pressed, x);
    });
    plot.addEventListener("pointerleave", () => { if (pressed === null) leave(); });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch" || event.target.closest("a")) return;
      pressed = share(plot, event);
      plot.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    plot.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const x = share(plot, event), width = to - from, first = Math.min(pressed, x), second = Math.max(pressed, x);
      pressed = null;
      range(null);
      if (second - first > 0.01) show(from + first * width, from + second * width);
    });
    plot.addEventListener("dblclick", () => show(0, 1));
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, from + share(plot, event) * (to - from));
    }, { passive: false });
  }

  // Keyboard: on the axis, + and - zoom, arrows move; on a mark, arrows go to the next one, Enter to its text.

  strip.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const mark = event.target.closest(".mark");
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && mark) {
      const shown = all(".mark").filter((each) => each.style.display !== "none");
      const next = shown[shown.indexOf(mark) + step];
      if (next) next.focus();
    } else if (step) move(step / 4);
    else if (event.key === "+" || event.key === "=") ZOOMS.in();
    else if (event.key === "-") ZOOMS.out();
    else if (event.key === "0" || event.key === "Escape") ZOOMS.all();
    else return;
    event.preventDefault();
  });
  for (const mark of all(".mark")) {
    mark.prepend(Object.assign(document.createElementNS(SVG, "title"), { textContent: mark.getAttribute("aria-label") }));
    mark.addEventListener("click", () => {
      const row = document.getElementById(mark.getAttribute("href").slice(1));
      if (row) setTimeout(() => row.focus({ preventScroll: true }));
    });
  }

  // The bands of one node.

  const select = document.getElementById("node");
  if (select) {
    const names = [...new Set(data.charts.flatMap((chart) => Object.keys(chart.nodes)))];
    for (const name of names) select.append(new Option(name, name));
    if (names.length < 2) select.closest(".zoom").hidden = true;
    select.addEventListener("change", () => all("figure").forEach((element) => choose(element, select.value)));
  }
  function choose(element, name) {
    const chart = data.charts[element.dataset.chart], group = element.querySelector(".chosen");
    group.replaceChildren();
    for (const each of all("[data-node], .view > .outlier", element)) {
      each.classList.toggle("is-dim", Boolean(name) && each.dataset.node !== name);
    }
    if (!name || !Object.hasOwn(chart.nodes, name) || element.querySelector(`[data-node="${CSS.escape(name)}"]`)) return;
    const [low, mid, high] = chart.nodes[name].map((text) => [...text].map((digit) => DIGITS.indexOf(digit)));
    const point = (values, index) => `${(index + 0.5) / mid.length * 1000} ${100 - values[index] / 63 * 100}`;
    let band = "", line = "", run = [];
    for (let index = 0; index <= mid.length; index++) {
      if (index < mid.length && mid[index] >= 0) { run.push(index); continue; }
      if (run.length) {
        line += `M${run.map((each) => point(mid, each)).join("L")}`;
        band += `M${[...run.map((each) => point(high, each)), ...run.reverse().map((each) => point(low, each))].join("L")}z`;
      }
      run = [];
    }
    for (const [kind, d] of [["band", band], ["line", line]]) {
      const path = group.appendChild(document.createElementNS(SVG, "path"));
      path.setAttribute("class", kind); path.setAttribute("d", d);
    }
  }

  // While the run goes on: the page is made anew, and is loaded again if somebody looks at it.

  function remember() {
    try { sessionStorage.setItem(KEY, from > 0 || to < 1 ? `${from} ${to}` : ""); } catch { /* Not everywhere. */ }
  }
  try {
    const [start, end] = (sessionStorage.getItem(KEY) || "0 1").split(" ").map(Number);
    show(start, end);
  } catch { show(0, 1); }
  window.addEventListener("resize", () => show(from, to));
  if (document.body.dataset.live) {
    const texts = all("details"), OPEN = `open ${location.pathname}`;
    try {
      const open = JSON.parse(sessionStorage.getItem(OPEN));
      if (open) texts.forEach((each, index) => { each.open = open.includes(index); });
    } catch { /* Not everywhere. */ }
    setInterval(() => {
      if (document.hidden || String(getSelection())) return;  // Nobody looks, or somebody copies.
      try {
        sessionStorage.setItem(OPEN, JSON.stringify(texts.flatMap((each, index) => each.open ? [index] : [])));
      } catch { /* Not everywhere. */ }
      location.reload();
    }, document.body.dataset.live * 1000);
  }
})();
