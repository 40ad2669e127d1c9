// What to do for a job: use a setting, stay, or cannot tell, as analysis/choose/decision.py decides it, in its sentences.

const z95 = 1.96;

// Figures as analysis/formatting.py writes them.
const rounded = (value, digits) => {
  const size = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  const decimals = Math.min(Math.max(digits - 1 - size, 0), digits);
  return Number(value.toFixed(decimals)).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
};
const durations = (...all) => {
  const largest = Math.max(...all.map(Math.abs));
  const [unitS, unit] = largest < 120 ? [1, "s"] : largest < 7200 ? [60, "min"] : [3600, "h"];
  return all.map((seconds) => `${rounded(seconds / unitS, 2)} ${unit}`.replace("-", "−"));
};
const duration = (seconds) => durations(seconds)[0];
const percent = (share) => `${share < 0 ? "−" : ""}${(100 * Math.abs(share)).toFixed(1)}%`;
const chance = (share) => (share > 0.998 ? "over 99.8%" : share < 0.002 ? "under 0.2%" : percent(share));
const gib = (bytes) => (bytes === null ? "—" : `${(bytes / 2 ** 30).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} GiB`);
const roundedUp = (steps) => {
  const unit = 10 ** Math.max(0, Math.floor(Math.log10(steps)) - 1);
  return Math.ceil(steps / unit) * unit;
};
const filled = (sentence, words) => sentence.replace(/\{(\w+)\}/g, (_, name) => words[name] ?? "");

// The normal distribution's cumulative function (Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most).
const normalCdf = (z) => {
  const t = 1 / (1 + 0.3275911 * Math.abs(z) / Math.SQRT2);
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-z * z / 2);
  return z >= 0 ? 1 - tail / 2 : tail / 2;
};

const lineOf = (setting, job) => {
  const [coldSd, warmSd] = [setting.cold_sd_s, setting.warm_sd_s ?? setting.cold_sd_s];
  const first = job.starts === "warm" ? warmSd : coldSd;
  const again = job.starts === "cold" ? coldSd : warmSd;
  return { fixed: startsOf(setting, job), fixedSd: Math.hypot(first, job.restarts * again), step: setting.step_s, stepSd: setting.step_sd_s };
};

const savingOf = (line, base, steps) => {
  const whole = base.fixed + steps * base.step;
  const saved = whole - (line.fixed + steps * line.step);
  const sd = Math.hypot(line.fixedSd, base.fixedSd, steps * line.stepSd, steps * base.stepSd);
  return { saved, low: saved - z95 * sd, high: Math.min(saved + z95 * sd, whole), share: saved / whole,
    probability: sd > 0 ? normalCdf(saved / sd) : Number(saved > 0) };
};

const clearFrom = (line, base) => {
  const [d, f] = [base.step - line.step, line.fixed - base.fixed];
  const [s, c] = [Math.hypot(line.stepSd, base.stepSd), Math.hypot(line.fixedSd, base.fixedSd)];
  const leading = d * d - (z95 * s) ** 2;
  if (d <= 0 || leading <= 0) return null;
  const root = Math.sqrt(Math.max((d * f) ** 2 - leading * (f * f - (z95 * c) ** 2), 0));
  const steps = Math.max((d * f + root) / leading, 1);
  return steps <= 1e12 ? Math.ceil(steps) : null;
};

const decide = (data, job) => {
  const lines = data.settings.map((one) => lineOf(one, job));
  const total = (place) => lines[place].fixed + job.steps * lines[place].step;
  const { baseline } = data;
  const ranked = lines.map((_, place) => place).filter((place) => place !== baseline).sort((a, b) => total(a) - total(b));
  if (baseline === null) return { lines, names: ["unknown", "unknown_why"], setting: ranked[0] };
  if (!ranked.length) return { lines, names: data.has_tried_others ? ["stay", "stay_alone"] : ["untried", "untried_why"], setting: null };
  const savings = lines.map((line) => savingOf(line, lines[baseline], job.steps));
  const setting = ranked.find((place) => savings[place].low > 0) ?? ranked[0];
  const saving = savings[setting];
  const worthHaving = saving.high >= data.negligible * total(baseline);
  if (saving.low > 0 && worthHaving) return { lines, names: ["use", "use_why"], setting, saving };
  if (!worthHaving) return { lines, names: ["stay", saving.high <= 0 ? "stay_loses" : "stay_negligible"], setting, saving };
  const clear = clearFrom(lines[setting], lines[baseline]);
  return { lines, names: ["unclear", "unclear_why", clear === null ? "unclear_again" : "unclear_longer"], setting, saving, clear };
};

const blanksOf = (data, job, { lines, setting, saving, clear }) => {
  const restarts = job.restarts ? `${job.restarts} restart${job.restarts === 1 ? "" : "s"}, ` : "";
  const words = { setting: data.settings[setting ?? 0].label, baseline: data.baseline_words,
    job: `${whole(job.steps)} steps of ${data.samples_per_step} samples a worker, ${restarts}${data.text.starts[job.starts]}` };
  if (!saving) return words;
  const [line, base] = [lines[setting], lines[data.baseline]];
  const [peak, basePeak] = [data.settings[setting].peak_bytes, data.settings[data.baseline].peak_bytes];
  const stepSaved = 1 - line.step / base.step;
  const stepWidth = z95 * Math.hypot(line.stepSd, base.stepSd) / base.step;
  const gibs = peak === null || basePeak === null ? null : Math.round((peak - basePeak) / 2 ** 30 * 10) / 10;
  const more = gibs === null ? "" : `${gibs < 0 ? "−" : "+"}${Math.abs(gibs).toFixed(1)}`;
  const [saved, low, high] = durations(saving.saved, saving.low, saving.high);
  const [lost, least, most] = durations(-saving.saved, -saving.high, -saving.low);
  return { ...words, saved, low, high, lost, least, most, whole: duration(base.fixed + job.steps * base.step), total: duration(line.fixed + job.steps * line.step),
    starts: duration(line.fixed), share: percent(saving.share), probability: chance(saving.probability),
    steps: clear ? whole(roundedUp(clear)) : "",
    step_saves: `${percent(stepSaved - stepWidth)} ${stepSaved + stepWidth < 1 ? `to ${percent(stepSaved + stepWidth)}` : "or more"}`,
    memory: gib(peak), memory_more: more && filled(data.text.memory_more, { more, baseline: words.baseline }) };
};

// The head of the page, for this job.
const sayDecision = (data, job) => {
  const found = decide(data, job);
  const blanks = blanksOf(data, job, found);
  const [lead, ...others] = found.names.map((name) => filled(data.text.sentences[name], blanks));
  if (found.saving && found.names[0] !== "stay") others.push(data.settings[found.setting].on_batches);
  const place = document.getElementById("decision");
  place.querySelector(".lead").textContent = lead;
  place.querySelector(".finding").textContent = others.filter(Boolean).join(" ");
  const tiles = place.querySelector(".tiles");
  tiles.hidden = !found.saving || found.names[0] === "stay";
  tiles.replaceChildren(...(tiles.hidden ? [] : data.text.tiles).map(([caption, [figure, under]]) => made("div", {},
    made("dt", { textContent: caption }),
    made("dd", {}, made("b", { textContent: filled(figure, blanks) }), " ", made("span", { textContent: filled(under, blanks) })))));
};
