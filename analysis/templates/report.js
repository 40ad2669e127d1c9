"use strict";

// The charts: each figure as Python made it, fitted to the page's width and colours.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const labelledWidth = 1000; // px; with less, the front's labels would collide and numbers stand for them
  const narrowWidth = 640; // px; as in report.css
  const small = { size: 11 };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const fitted = (chart, figure) => {
    const axis = (one) => ({ ...one, gridcolor: color("--grid") });
    return {
      ...figure.layout,
      width: chart.clientWidth,
      height: chart.clientHeight,
      paper_bgcolor: color("--page"),
      plot_bgcolor: color("--page"),
      font: { ...figure.layout.font, color: color("--ink") },
      hoverlabel: { ...figure.layout.hoverlabel, bgcolor: color("--page"), font: { ...figure.layout.hoverlabel.font, color: color("--ink") } },
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
    };
  };

  const frontLabel = (one, labelled) => {
    if (labelled || !one.name) return one;
    if (!one.name.startsWith("front-")) return { ...one, visible: false };
    const reach = 16 / Math.hypot(one.ax, one.ay); // px; the way the label lay, so that neighbours stay apart
    return { ...one, text: `<b>${one.name.slice("front-".length)}</b>`, ax: reach * one.ax, ay: reach * one.ay, arrowcolor: "rgba(0,0,0,0)" };
  };

  const front = (chart, figure) => {
    const layout = fitted(chart, figure);
    layout.annotations = (figure.layout.annotations || []).map((one) => frontLabel(one, chart.clientWidth >= labelledWidth));
    if (chart.clientWidth < narrowWidth) {
      layout.margin = { l: 54, r: 10, t: 58, b: 138 };
      const plot = layout.height - layout.margin.t - layout.margin.b;
      const rows = { font: small, x: 0, title: { text: "" } };
      layout.xaxis.title = { ...layout.xaxis.title, text: "cold compile time (s, logarithmic)", font: small };
      layout.yaxis.title = { ...layout.yaxis.title, text: "samples per second", font: small };
      layout.xaxis.tickfont = layout.yaxis.tickfont = small;
      layout.hoverlabel.font.size = 11;
      layout.legend = { ...layout.legend, ...rows };
      layout.legend2 = { ...layout.legend2, ...rows, y: -58 / plot, yanchor: "top" };
    }
    return { data: figure.data, layout };
  };

  const broken = (text, most) => {
    const lines = [];
    for (const word of text.split(" ")) {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (lines.length && longer.replace(/<[^>]*>/g, "").length <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines;
  };

  const phases = (chart, figure) => {
    const layout = { ...fitted(chart, figure), height: figure.layout.height };
    const outlined = (trace) => ({ ...trace.marker, line: { ...trace.marker.line, color: color("--page") } });
    let data = figure.data.map((trace) => ({ ...trace, marker: outlined(trace) }));
    if (chart.clientWidth < narrowWidth) { // names take several lines, so places become pixels
      const [barHeight, lineHeight, gap] = [18, 15, 14];
      const names = figure.layout.annotations.map((one) => broken(one.text, Math.floor(chart.clientWidth / 6.8)));
      let bottom = 0;
      const middles = names.map((lines) => {
        bottom += lines.length * lineHeight + barHeight + gap;
        return bottom - gap - barHeight / 2;
      });
      data = data.map((trace) => ({ ...trace, y: trace.y.map((place) => middles[place]), width: barHeight }));
      layout.annotations = figure.layout.annotations.map((one, place) => (
        { ...one, text: names[place].join("<br>"), y: middles[place] - barHeight / 2, font: { size: 12 } }));
      layout.yaxis = { ...layout.yaxis, range: [bottom, 0] };
      layout.margin = { ...layout.margin, l: 4, r: 8, t: 84 };
      layout.height = bottom + layout.margin.t + layout.margin.b;
      layout.legend = { ...layout.legend, font: small };
      layout.xaxis.tickfont = small;
      layout.xaxis.title = { ...layout.xaxis.title, font: small };
      layout.hoverlabel.font.size = 11;
    }
    return { data, layout };
  };

  for (const [id, fit] of [["chart", front], ["phases-chart", phases]]) {
    const chart = document.getElementById(id);
    if (!chart) continue;
    const figure = JSON.parse(document.getElementById(chart.dataset.figure).textContent);
    const draw = () => { // anew: Plotly.react leaves the legends of a chart of another size where they were
      const { data, layout } = fit(chart, figure);
      Plotly.newPlot(chart, data, layout, { displaylogo: false, displayModeBar: false, responsive: false });
    };
    draw();
    dark.addEventListener("change", draw);
    let width = chart.clientWidth;
    addEventListener("resize", () => {
      if (chart.clientWidth !== width) {
        width = chart.clientWidth;
        draw();
      }
    });
  }
})();

// The table: a heading sorts by its column, first the better-known way round, then the other.
(() => {
  const table = document.getElementById("trials");
  if (!table) return;
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];

  const all = document.getElementById("all-columns");
  const showColumns = () => table.classList.toggle("all", all.checked);
  all.addEventListener("change", showColumns);
  showColumns(); // a browser keeps the tick over a reload

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
