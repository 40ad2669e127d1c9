// The charts of the page: drawn one after another, anew where the width or the colours change, and walked through by key.

const unpacked = async (id) => {
  const letters = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place); // Uint8Array.from takes ten times as long
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};

const run = (source) => { // its digest is in the page's policy
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
};

const kept = { // over a reload, as while a sweep runs
  read: (name, otherwise) => {
    try { return JSON.parse(sessionStorage.getItem(`${location.pathname} ${name}`)) ?? otherwise; } catch { return otherwise; }
  },
  write: (name, value) => {
    try { sessionStorage.setItem(`${location.pathname} ${name}`, JSON.stringify(value)); } catch { /* not kept then */ }
  },
};

const said = document.getElementById("said");
const plainText = (markup) => new DOMParser().parseFromString(markup.replaceAll("<br>", " \n"), "text/html").body.textContent;

class Chart {
  constructor(element, figure, decorate = (fit) => fit) {
    this.element = element;
    this.figure = figure; // () → the figure to show now
    this.decorate = decorate; // what the page adds to it
    this.isDrawn = false;
    this.walked = -1;
    element.tabIndex = 0;
    element.addEventListener("keydown", (event) => this.walk(event));
    element.addEventListener("blur", () => this.leave());
    element.style.height = `${this.fit().layout.height}px`; // so that nothing moves when it is drawn
  }

  fit() { return this.decorate(fitted(this.element, this.figure()), this.element); }

  draw() { // anew: Plotly.react leaves the legends of a chart of another size where they were
    const { data, layout } = this.fit();
    this.element.style.height = `${layout.height}px`;
    this.width = this.element.clientWidth;
    this.walked = -1;
    Plotly.newPlot(this.element, data, layout, { displaylogo: false, displayModeBar: false, responsive: false });
    this.element.on("plotly_clickannotation", ({ annotation }) => {
      if (annotation.name?.includes("=")) dispatchEvent(new CustomEvent("toggle-term", { detail: annotation.name }));
    });
    this.isDrawn = true;
  }

  points() { // what can be hovered over, from left to right, or in rows from the top
    const inRows = this.figure().layout.meta?.kind === "rows";
    const found = this.element.data.flatMap((trace, curveNumber) => (
      trace.visible === false || trace.visible === "legendonly" || trace.hoverinfo === "skip" || !trace.hovertext ? []
        : [trace.hovertext].flat().map((text, pointNumber) => (
          { curveNumber, pointNumber, text, x: Number(trace.base?.[pointNumber] ?? trace.x?.[pointNumber] ?? 0), y: Number(trace.y?.[pointNumber] ?? 0) }))));
    return found.sort((a, b) => (inRows ? a.y - b.y || a.curveNumber - b.curveNumber : a.x - b.x || a.y - b.y));
  }

  walk(event) {
    const points = this.points();
    const places = { ArrowRight: this.walked + 1, ArrowDown: this.walked + 1, ArrowLeft: this.walked - 1, ArrowUp: this.walked - 1, Home: 0, End: points.length - 1 };
    if (event.key === "Escape") this.leave();
    if (!(event.key in places) || !points.length || event.target !== this.element) return;
    event.preventDefault();
    this.walked = Math.min(Math.max(places[event.key], 0), points.length - 1);
    const { curveNumber, pointNumber, text } = points[this.walked];
    Plotly.Fx.hover(this.element, [{ curveNumber, pointNumber }]);
    said.textContent = plainText(text);
  }

  leave() {
    if (this.walked >= 0) Plotly.Fx.unhover(this.element);
    this.walked = -1;
  }
}

const charts = [];
const chartOf = (id) => charts.find((chart) => chart.element.id === id);

const drawAll = () => charts.forEach((chart) => chart.isDrawn && chart.draw());
addEventListener("theme", drawAll);
addEventListener("resize", () => charts.forEach((chart) => chart.isDrawn && chart.element.clientWidth !== chart.width && chart.draw()));

let themeOnScreen = null;
let finishPage = () => {}; // what is left to set up, in case the page is printed before it is
const beforePrint = () => {
  if (themeOnScreen !== null) return;
  finishPage();
  themeOnScreen = root.dataset.theme;
  root.dataset.theme = "light";
  root.dataset.printing = "yes";
  document.querySelectorAll("details:not([open])").forEach((one) => { one.open = true; one.dataset.closed = "yes"; });
  charts.forEach((chart) => chart.draw());
};
const afterPrint = () => {
  if (themeOnScreen === null) return;
  root.dataset.theme = themeOnScreen;
  themeOnScreen = null;
  delete root.dataset.printing;
  document.querySelectorAll("details[data-closed]").forEach((one) => { one.open = false; delete one.dataset.closed; });
  drawAll();
};
addEventListener("beforeprint", beforePrint);
addEventListener("afterprint", afterPrint);

// A group of radio buttons, each with its figure: which is shown is kept.
const choice = (name, otherwise, changed) => {
  const buttons = [...document.querySelectorAll(`input[name="${CSS.escape(name)}"]`)];
  const wanted = kept.read(name, otherwise);
  const button = buttons.find((one) => one.value === wanted) ?? buttons[0];
  if (button) button.checked = true;
  buttons.forEach((one) => one.addEventListener("change", () => {
    kept.write(name, one.value);
    changed();
  }));
  return () => buttons.find((one) => one.checked)?.value ?? otherwise;
};

const setUpCharts = (figures) => {
  const main = document.getElementById("chart");
  if (main) {
    const redraw = () => chartOf("chart").draw();
    const price = choice("front-price", "compile", redraw);
    const gain = choice("front-gain", "samples", redraw);
    charts.push(new Chart(main, () => figures[`front ${price()} ${gain()}`]));
  }
  for (const element of document.querySelectorAll(".chart[data-figure]")) {
    const figure = figures[element.dataset.figure];
    element.style.minWidth = `${figure.layout.meta?.min_width ?? 0}px`;
    charts.push(new Chart(element, () => figure));
  }
};

const drawNext = () => { // whether there was one to draw
  const next = charts.find((chart) => !chart.isDrawn);
  if (!next) return false;
  next.draw();
  if (next === charts[0]) root.dataset.ready = Math.round(performance.now());
  return true;
};

const painted = () => new Promise((resolve) => { // what is drawn
  requestAnimationFrame(() => setTimeout(resolve, 0));
  setTimeout(resolve, 100); // ms; a hidden page is not painted
});

const drawInTurn = () => {
  if (drawNext()) setTimeout(drawInTurn, 0);
  else root.dataset.drawn = "all";
};
