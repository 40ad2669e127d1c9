// Each figure as Python made it, fitted to the page's width and colours: (element, figure) → {data, layout}.

const root = document.documentElement;
const narrowWidth = 640; // px; as in report.css
const labelledWidth = 1000; // px; with less, the front's labels would collide and numbers stand for them
const small = { size: 11 };
const printWidth = 700; // px; what a page of paper holds

const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const widthOf = (element) => (root.dataset.printing ? Math.min(printWidth, element.clientWidth) : element.clientWidth);
const isNarrow = (element) => widthOf(element) < narrowWidth;

const framed = (element, figure) => {
  const { layout } = figure;
  const axis = (one) => ({ ...one, gridcolor: color("--grid") });
  const framedLayout = {
    ...layout,
    width: widthOf(element),
    height: layout.height,
    paper_bgcolor: color("--page"),
    plot_bgcolor: color("--page"),
    font: { ...layout.font, color: color("--ink") },
    hoverlabel: { ...layout.hoverlabel, bgcolor: color("--page"), font: { ...layout.hoverlabel.font, color: color("--ink") } },
    xaxis: axis(layout.xaxis),
    yaxis: axis(layout.yaxis),
  };
  if (isNarrow(element)) {
    framedLayout.xaxis.tickfont = framedLayout.yaxis.tickfont = small;
    framedLayout.xaxis.title = { ...layout.xaxis.title, font: small };
    framedLayout.yaxis.title = { ...layout.yaxis.title, font: small };
    framedLayout.legend = { ...layout.legend, font: small };
    framedLayout.hoverlabel.font.size = 11;
  }
  return framedLayout;
};

const frontLabel = (one, labelled) => {
  if (labelled || !one.name) return one;
  if (!one.name.startsWith("front-")) return { ...one, visible: false };
  const reach = 16 / Math.hypot(one.ax, one.ay); // px; the way the label lay, so that neighbours stay apart
  return { ...one, text: `<b>${one.name.slice("front-".length)}</b>`, ax: reach * one.ax, ay: reach * one.ay, arrowcolor: "rgba(0,0,0,0)" };
};

const fitFront = (element, figure) => {
  const layout = framed(element, figure);
  layout.annotations = (figure.layout.annotations || []).map((one) => frontLabel(one, widthOf(element) >= labelledWidth));
  if (isNarrow(element)) {
    layout.height = 600;
    layout.margin = { l: 54, r: 10, t: 16, b: 158 };
    const plot = layout.height - layout.margin.t - layout.margin.b;
    const rows = { font: small, x: 0, title: { text: "" } };
    if (figure.layout.meta) {
      layout.xaxis.title = { ...layout.xaxis.title, text: figure.layout.meta.x };
      layout.yaxis.title = { ...layout.yaxis.title, text: figure.layout.meta.y };
    }
    layout.legend = { ...layout.legend, ...rows, y: -58 / plot, yanchor: "top" };
  } else if (widthOf(element) < labelledWidth) { // several rows above the chart would not fit
    const below = 64; // px
    layout.height += below;
    layout.margin = { ...layout.margin, b: layout.margin.b + below };
    layout.legend = { ...layout.legend, y: -60 / (layout.height - layout.margin.t - layout.margin.b), yanchor: "top" };
  }
  return { data: figure.data, layout };
};

const withoutTags = (text) => text.replace(/<[^>]*>/g, "");

const broken = (text, most) => {
  const lines = [];
  for (const word of text.split(" ")) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && withoutTags(longer).length <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
};

const outlined = (trace) => (
  trace.type === "bar" ? { ...trace, marker: { ...trace.marker, line: { ...trace.marker.line, color: color("--page") } } } : trace);

const fitRows = (element, figure) => {
  const layout = framed(element, figure);
  let data = figure.data.map(outlined);
  const charWidth = 6.8; // px
  const longest = Math.max(0, ...(figure.layout.annotations || []).map((one) => withoutTags(one.text).length));
  if (isNarrow(element) || longest * charWidth > widthOf(element) - 40) { // names take several lines, so places become pixels
    const [drawn, lineHeight, gap] = [18, 15, 14];
    const share = 0.42; // of a row that is drawn in; as in setting_rows.py
    const names = figure.layout.annotations.map((one) => broken(one.text, Math.floor((widthOf(element) - 20) / charWidth)));
    let bottom = 0;
    const middles = names.map((lines) => {
      bottom += lines.length * lineHeight + drawn + gap;
      return bottom - gap - drawn / 2;
    });
    const moved = (y) => {
      const place = Math.min(Math.max(Math.round(y), 0), middles.length - 1);
      return middles[place] + (y - place) * drawn / share;
    };
    data = data.map((trace) => ({ ...trace, y: trace.y.map(moved), ...(trace.width ? { width: trace.width * drawn / share } : {}) }));
    layout.annotations = figure.layout.annotations.map((one, place) => (
      { ...one, text: names[place].join("<br>"), y: middles[place] - drawn / 2, font: { size: 12 } }));
    layout.yaxis = { ...layout.yaxis, range: [bottom, 0] };
    const entries = figure.data.filter((trace) => trace.showlegend !== false).length; // many are short enough to stand in pairs
    const legendRows = entries > 4 ? Math.ceil(entries / 2) : entries;
    const room = isNarrow(element) ? { l: 4, r: 8, t: 8 + 19 * legendRows } : { t: widthOf(element) < labelledWidth ? 78 : 64 };
    layout.margin = { ...layout.margin, ...room, ...(layout.showlegend === false ? { t: 6 } : {}) };
    layout.height = bottom + layout.margin.t + layout.margin.b;
  }
  return { data, layout };
};

const fitLanes = (element, figure) => {
  const layout = framed(element, figure);
  layout.margin = { ...layout.margin, ...(isNarrow(element) ? { l: 40, r: 8 } : {}) };
  const entries = figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name.length);
  const entryWidth = 46 + (isNarrow(element) ? 6 : 7) * Math.max(0, ...entries); // px
  const across = Math.max(1, Math.floor((widthOf(element) - layout.margin.l - layout.margin.r) / entryWidth));
  const above = 18 + 19 * Math.ceil(entries.length / across);
  layout.height += above - layout.margin.t;
  layout.margin.t = above;
  return { data: figure.data.map(outlined), layout };
};

const fitParallel = (element, figure) => {
  const layout = framed(element, figure);
  const page = color("--page");
  const isTight = widthOf(element) < figure.layout.meta.min_width; // as on paper, which does not scroll
  layout.annotations = figure.layout.annotations.map((one) => ({
    ...one, bgcolor: page, borderpad: 0, font: { size: isTight ? 8 : one.font.size, color: color("--ink") },
    ...(isTight && one.text.startsWith("<b>") ? { textangle: -25 } : {}),
  }));
  const shown = shownKeys();
  const data = figure.data.map((trace) => (
    shown && !shown.has(trace.meta) ? { ...trace, opacity: 0.07, hoverinfo: "skip" } : trace));
  return { data, layout };
};

const fitPlain = (element, figure) => {
  const layout = framed(element, figure);
  if (isNarrow(element)) layout.margin = { ...layout.margin, l: 54, r: 18 };
  return { data: figure.data, layout };
};

const fits = { front: fitFront, rows: fitRows, lanes: fitLanes, parallel: fitParallel };
const fitted = (element, figure) => (fits[figure.layout.meta?.kind] ?? fitPlain)(element, figure);
