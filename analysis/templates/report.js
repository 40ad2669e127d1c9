"use strict";

// The chart: the figure as Python made it, fitted to the page's width and colours.
(() => {
  const chart = document.getElementById("chart");
  if (!chart) return;
  const figure = JSON.parse(document.getElementById("figure").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const annotations = figure.layout.annotations || [];
  const labelledWidth = 1000; // px; with less, the front's labels would collide and numbers stand for them
  const narrowWidth = 640; // px; as in report.css

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const annotation = (one, labelled) => {
    if (labelled || !one.name) return one;
    if (!one.name.startsWith("front-")) return { ...one, visible: false };
    const reach = 16 / Math.hypot(one.ax, one.ay); // px; the way the label lay, so that neighbours stay apart
    return { ...one, text: `<b>${one.name.slice("front-".length)}</b>`, ax: reach * one.ax, ay: reach * one.ay, arrowcolor: "rgba(0,0,0,0)" };
  };

  const layout = () => {
    const narrow = chart.clientWidth < narrowWidth;
    const axis = (one) => ({ ...one, gridcolor: color("--grid") });
    const fitted = {
      ...figure.layout,
      width: chart.clientWidth,
      height: chart.clientHeight,
      paper_bgcolor: color("--page"),
      plot_bgcolor: color("--page"),
      font: { ...figure.layout.font, color: color("--ink") },
      hoverlabel: { ...figure.layout.hoverlabel, bgcolor: color("--page"), font: { ...figure.layout.hoverlabel.font, color: color("--ink") } },
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      annotations: annotations.map((one) => annotation(one, chart.clientWidth >= labelledWidth)),
    };
    if (narrow) {
      const small = { size: 11 };
      fitted.margin = { l: 54, r: 10, t: 58, b: 138 };
      const plot = fitted.height - fitted.margin.t - fitted.margin.b;
      const rows = { font: small, x: 0, title: { text: "" } };
      fitted.xaxis.title = { ...fitted.xaxis.title, text: "cold compile time (s, logarithmic)", font: small };
      fitted.yaxis.title = { ...fitted.yaxis.title, text: "samples per second", font: small };
      fitted.xaxis.tickfont = fitted.yaxis.tickfont = small;
      fitted.hoverlabel.font.size = 11;
      fitted.legend = { ...fitted.legend, ...rows };
      fitted.legend2 = { ...fitted.legend2, ...rows, y: -58 / plot, yanchor: "top" };
    }
    return fitted;
  };

  const draw = () => Plotly.react(chart, figure.data, layout(), { displaylogo: false, displayModeBar: false, responsive: false });
  draw();
  dark.addEventListener("change", draw);
  let width = chart.clientWidth;
  addEventListener("resize", () => {
    if (chart.clientWidth !== width) {
      width = chart.clientWidth;
      draw();
    }
  });
})();

// The table: a heading sorts by its column, first the better-known way round, then the other.
(() => {
  const table = document.getElementById("trials");
  if (!table) return;
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];

  const compare = (one, other, sign) => {
    if (one.dataset.text !== undefined) return sign * one.dataset.text.localeCompare(other.dataset.text);
    const [a, b] = [one.dataset.number, other.dataset.number];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined); // no figure: last, either way
    return sign * (Number(a) - Number(b));
  };

  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], descending ? -1 : 1));
      body.append(...rows);
    });
  });

  const status = document.getElementById("copied");
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text); // absent or refused on some file:// pages
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  table.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const done = await copy(button.dataset.copy);
    button.focus();
    button.textContent = done ? "Copied" : "No access";
    status.textContent = done ? `Copied ${button.dataset.copy}` : "The browser refused to copy.";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
})();
