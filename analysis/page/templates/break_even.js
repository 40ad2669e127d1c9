// Break-even: which setting takes least for a job of a given length, as analysis/choose/break_even.py reckons it.

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // against plotly's mark-up
const whole = (value) => Math.round(value).toLocaleString("en");
const money = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 2 : 0 });

// What every length of a job takes under a setting: starts, then steps.
const startsOf = (setting, job) => {
  const warm = setting.warm_s ?? setting.cold_s; // what was not measured warm starts cold
  const first = job.starts === "warm" ? warm : setting.cold_s;
  const again = job.starts === "cold" ? setting.cold_s : warm;
  return first + job.restarts * again;
};
const totalOf = (setting, job, steps) => startsOf(setting, job) + steps * setting.step_s;

// The shortest setting for every length: the lower envelope of their lines.
const reignsOf = (settings, job) => {
  const first = (a, b) => totalOf(a, job, 1) - totalOf(b, job, 1) || a.step_s - b.step_s;
  let at = [...settings].sort(first)[0];
  const found = [{ setting: at, from: 1 }];
  for (;;) {
    const next = settings.filter((one) => one.step_s < at.step_s)
      .map((one) => ({ setting: one, from: Math.floor((startsOf(one, job) - startsOf(at, job)) / (at.step_s - one.step_s)) + 1 }))
      .sort((a, b) => a.from - b.from || totalOf(a.setting, job, a.from) - totalOf(b.setting, job, b.from) || a.setting.step_s - b.setting.step_s)[0];
    if (!next) return found;
    next.from = Math.max(next.from, found[found.length - 1].from);
    if (next.from === found[found.length - 1].from) found.pop();
    found.push(next);
    at = next.setting;
  }
};

const setUpBreakEven = (data, figure) => {
  const form = document.getElementById("job");
  const { settings, baseline } = data;
  const base = settings[baseline ?? 0];
  const field = (name) => form.elements[name];
  const job = {};

  for (const [name, value] of Object.entries(kept.read("job", {}))) if (field(name)) field(name).value = value;

  const amount = (name, least) => Math.max(least, Number(field(name).value) || 0);
  const read = () => {
    job.steps = Math.round(Number((10 ** Number(field("decades").value)).toPrecision(2)));
    job.restarts = Math.floor(amount("restarts", 0));
    job.gpus = Math.floor(amount("gpus", 1));
    job.price = amount("price", 0);
    job.starts = field("starts")?.value ?? "cold";
    kept.write("job", Object.fromEntries([...form.elements].filter((one) => one.name).map((one) => [one.name, one.value])));
  };

  const marker = () => ({
    type: "line", x0: job.steps, x1: job.steps, yref: "paper", y0: 0, y1: 1, line: { color: color("--accent"), width: 2 },
  });
  const crossings = () => reignsOf(settings, job).slice(1).filter(({ from }) => from >= data.min_steps && from <= data.max_steps)
    .map(({ from }) => ({ type: "line", x0: from, x1: from, yref: "paper", y0: 0, y1: 1, line: { color: "#8a8a8a", width: 1, dash: "dot" } }));

  const isDrawn = (place) => place === (baseline ?? 0) || place === 0 || settings[place].is_plain
    || reignsOf(settings, job).some(({ setting }) => setting === settings[place]);
  const ratio = (place, steps) => totalOf(settings[place], job, steps) / totalOf(base, job, steps);

  const nameLine = 17; // px; as in break_even_chart.py
  const legendChars = 44;
  const shortened = (text, most, count) => {
    const lines = broken(text, most);
    return lines.length > count ? [...lines.slice(0, count - 1), `${lines[count - 1]} …`] : lines;
  };

  // Names stand in the right margin, each joined to its line's end; a narrow screen has a legend under the chart instead.
  const named = (drawn, layout, element) => {
    if (isNarrow(element)) {
      const rows = drawn.reduce((sum, place) => sum + shortened(settings[place].label, legendChars, 2).length, 0);
      const below = 16 * rows + 6 * drawn.length; // px
      const { t, b } = layout.margin;
      const plot = layout.height - t - b;
      return { ...layout, annotations: [], showlegend: true, height: layout.height + below,
        margin: { ...layout.margin, r: 14, b: b + below },
        legend: { ...layout.legend, orientation: "v", x: 0, xanchor: "left", y: -60 / plot, yanchor: "top", title: { text: "" } } };
    }
    const isWide = widthOf(element) >= labelledWidth;
    const room = isWide ? layout.margin.r : 200;
    const unit = (layout.height - layout.margin.t - layout.margin.b) / layout.yaxis.range[1];
    let lowest = 0;
    const annotations = [...drawn].sort((a, b) => ratio(a, data.max_steps) - ratio(b, data.max_steps)).map((place) => {
      const lines = shortened(settings[place].label, isWide ? 38 : 25, 3);
      const end = ratio(place, data.max_steps);
      const half = lines.length * nameLine / unit / 2;
      const middle = Math.max(end, lowest + half);
      lowest = middle + half;
      return { ...layout.annotations[0], name: `line-${place}`, text: lines.map(escaped).join("<br>"), y: end, ay: (end - middle) * unit,
        arrowcolor: data.colors[settings[place].scope] };
    });
    return { ...layout, annotations, margin: { ...layout.margin, r: room } };
  };

  const decorate = ({ data: traces, layout }, element) => {
    const drawn = traces.filter(({ meta }) => isDrawn(meta)).map(({ meta }) => meta);
    const visible = new Set(drawn);
    return {
      data: traces.map((trace) => ({ ...trace, visible: visible.has(trace.meta), y: trace.x.map((steps) => ratio(trace.meta, steps)),
        ...(isNarrow(element) ? { name: shortened(settings[trace.meta].label, legendChars, 2).map(escaped).join("<br>") } : {}),
        hovertext: trace.x.map((steps, point) => (
          `${trace.hovertext[point].split("<br>")[0]}<br>${whole(steps)} steps: ${duration(totalOf(settings[trace.meta], job, steps))}`)) })),
      layout: { ...named(drawn, layout, element), shapes: [...crossings(), marker()] },
    };
  };

  const ranking = document.getElementById("job-ranking");
  const flips = document.getElementById("job-flips");
  const worth = (seconds) => duration(seconds) + (job.price ? ` (${money(seconds * job.gpus * job.price / 3600)})` : "");

  const say = () => {
    const ranked = settings.map((one) => ({ one, total: totalOf(one, job, job.steps) })).sort((a, b) => a.total - b.total);
    const [best, ...others] = ranked;
    field("decades").ariaValueText = `${whole(job.steps)} steps`;
    document.getElementById("job-length").textContent = `${whole(job.steps)} steps`;
    sayDecision(data, job);
    const longest = Math.max(...ranked.slice(0, 5).map(({ total }) => total));
    ranking.replaceChildren(...[best, ...others.slice(0, 4)].map(({ one, total }) => made("li", {},
      made("span", { textContent: one.label }),
      made("meter", { min: 0, max: longest, value: total, ariaLabel: `${one.label}: ${duration(total)}` }),
      made("span", { className: "figures", textContent: `${worth(total)}, including ${duration(startsOf(one, job))} for starts` }))));
    const options = [` --steps ${job.steps}`, job.restarts ? ` --restarts ${job.restarts}` : "", job.starts === "cold" ? "" : ` --starts ${job.starts}`,
      job.gpus === base.num_workers ? "" : ` --gpus-per-node ${job.gpus}`, job.price ? ` --price-per-gpu-hour ${job.price}` : ""].join("");
    for (const [id, name] of [["command-recommend", "recommend"], ["command-job", "export"]]) {
      document.getElementById(id).textContent = inFolder(`compile-sweep ${name} DIR${options}`);
    }
    const reigns = reignsOf(settings, job);
    flips.replaceChildren(...reigns.map(({ setting, from }, place) => {
      const next = reigns[place + 1];
      const range = place === 0 ? (next ? `up to ${whole(next.from - 1)} steps` : "at any length")
        : `from ${whole(from)} steps (${duration(totalOf(setting, job, from))})${next ? ` to ${whole(next.from - 1)}` : ""}`;
      return made("li", {}, `${range}: `, made("b", { textContent: setting.label }));
    }));
  };

  read();
  const chart = new Chart(document.getElementById("break-even-chart"), () => figure, decorate);
  charts.push(chart);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    read();
    say();
    if (!chart.isDrawn) return;
    if (event.target.name === "decades") Plotly.relayout(chart.element, { shapes: [...crossings(), marker()] });
    else chart.draw();
  });
  say();
};
