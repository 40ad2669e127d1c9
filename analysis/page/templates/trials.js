// The table: sorted, filtered, its columns chosen, a page of rows at a time. Records reach the page only as textContent.

const pageOfRows = 30;
let filterText = kept.read("filter", "");

const fieldsOf = (key) => key.split(",").map((field) => field.trim().toLowerCase());
const numeric = /^([a-z][\w-]*)(<=|>=|<|>)(-?[\d.]+)$/;
const comparisons = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b };

// A row matches if it matches every word: `regional` is text, `scope=full` a field, `compile<60` a figure.
const matcher = (text, columns) => {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, limit] = word.match(numeric) ?? [];
    const column = name ? columns.findIndex((one) => one.title.toLowerCase().replaceAll(" ", "-").startsWith(name)) : -1;
    if (column >= 0) return (row) => row.cells[column][1] !== null && comparisons[sign](row.cells[column][1], Number(limit));
    if (/^[\w.]+=./.test(word)) return (row) => row.fields.includes(word);
    return (row) => row.words.includes(word);
  });
  return (row) => tests.every((test) => test(row));
};

let allRows = [];
let matching = null; // rows the filter lets through; null without one
const shownKeys = () => matching && new Set(matching.map((row) => row.key));

const made = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

const copied = document.getElementById("copied");
const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text); // absent or refused on some file:// pages
    return true;
  } catch {
    const area = made("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
};
const copyOnClick = (button, text) => {
  const words = button.textContent;
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.focus();
    button.textContent = done ? "Copied" : "No access";
    copied.textContent = done ? `Copied ${text()}` : "The browser refused to copy.";
    setTimeout(() => { button.textContent = words; }, 1500);
  });
  return button;
};
const copyButton = (words, text, label, className = "copy-as") => (
  copyOnClick(made("button", { type: "button", className, textContent: words, ariaLabel: label }), text));

const setUpTrials = (table) => {
  const element = document.getElementById("trials");
  if (!element) return;
  const { columns } = table;
  const head = element.tHead.rows[0];
  const body = element.tBodies[0];
  const count = document.getElementById("row-count");
  const more = document.getElementById("more-rows");
  const unusable = document.getElementById("unusable-too");
  const sort = kept.read("sort", { column: 0, ascending: false });
  let shown = pageOfRows;

  allRows = table.rows.map((row) => ({
    ...row,
    fields: fieldsOf(row.key),
    words: [row.name, row.label, row.key, row.status, ...row.remarks.map(([words]) => words)].join(" ").toLowerCase(),
  }));

  // Columns by number: setting, the figures, numerics, remarks; remarks stand second.
  const hidden = new Set(kept.read("hidden", columns.flatMap((column, place) => (column.is_detail ? [place] : []))));
  const chooser = document.getElementById("columns");
  columns.forEach((column, place) => {
    const box = made("input", { type: "checkbox", checked: !hidden.has(place), value: String(place) });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(place); else hidden.add(place);
      kept.write("hidden", [...hidden]);
      fill();
    });
    chooser.append(made("label", { className: "switch", title: column.meaning }, box, ` ${column.title}`));
  });
  const boxes = [...chooser.querySelectorAll("input")];
  document.getElementById("all-columns").addEventListener("change", (event) => {
    hidden.clear();
    if (!event.target.checked) columns.forEach((column, place) => column.is_detail && hidden.add(place));
    boxes.forEach((box, place) => { box.checked = !hidden.has(place); });
    kept.write("hidden", [...hidden]);
    fill();
  });

  const keys = [(row) => Number(row.name.slice(1).split(" ")[0]), ...columns.map((_, place) => (row) => row.cells[place][1]), (row) => row.numerics[0],
    (row) => row.remarks.map(([words]) => words).join(", ")];
  const compare = (a, b) => {
    const [one, other] = [keys[sort.column + 1](a), keys[sort.column + 1](b)];
    const sign = sort.ascending ? 1 : -1;
    if (typeof one === "string") return sign * one.localeCompare(other);
    if (one === null || other === null) return (one === null) - (other === null); // no figure: last, either way
    return sign * (one - other);
  };

  const heading = (title, unit, meaning, column, isWords) => {
    const button = made("button", { type: "button" }, title, ...(unit ? [" ", made("small", { textContent: unit })] : []));
    const cell = made("th", { scope: "col", title: meaning, className: isWords ? "words" : "" }, button);
    cell.ariaSort = sort.column === column ? (sort.ascending ? "ascending" : "descending") : "none";
    button.addEventListener("click", () => {
      sort.ascending = sort.column === column ? !sort.ascending : true;
      sort.column = column;
      kept.write("sort", sort);
      shown = pageOfRows;
      fill();
      head.cells[[...head.cells].findIndex((one) => one.dataset.column === String(column))].firstChild.focus();
    });
    cell.dataset.column = column;
    return cell;
  };

  const figureCell = ([words, , under, note]) => (
    made("td", note ? { title: note } : {}, words, ...(under ? [" ", made("small", { textContent: under })] : [])));

  const rowOf = (row) => {
    const star = row.on_front ? [made("span", { role: "img", ariaLabel: "on the front", textContent: "★" })] : [];
    const name = made("div", { className: "setting" },
      made("span", { className: "star" }, ...star),
      made("span", { className: "name", textContent: row.name }),
      made("span", { className: "copies" },
        copyButton("Copy", () => row.key, `Copy ${row.name}`, "copy"),
        copyButton("Python", () => row.python ?? `CompileSettings.parse(${JSON.stringify(row.key)})`, `Copy ${row.name} as Python`),
        copyButton("CLI", () => `${table.command} --settings '${row.key.replaceAll("'", "'\\''")}'${table.arguments}`, `Copy ${row.name} as a command`)));
    const cells = row.cells.flatMap((cell, place) => (hidden.has(place) ? [] : [figureCell(cell)]));
    const numerics = figureCell(row.numerics);
    numerics.className = "words";
    const status = row.status === "ok" ? [] : [made("span", { className: `tag ${row.status}`, textContent: row.outcome })];
    const remarks = row.remarks.map(([words, meaning]) => made("span", { className: "tag doubt", textContent: words, title: meaning }));
    const tags = [...status, ...remarks].flatMap((tag) => [tag, " "]);
    const below = made("div", { className: "below" }, ...tags.map((tag) => tag.cloneNode?.(true) ?? tag)); // on narrow screens
    return made("tr", {}, made("th", { scope: "row", title: `${row.label}\n${row.key}` }, name, ...(tags.length ? [below] : [])),
      made("td", { className: "words remarks" }, ...tags), ...cells, numerics);
  };

  const fill = () => {
    head.replaceChildren(
      heading("setting", "", "", -1, true),
      heading("remarks", "", "what is unusual about how it was measured", columns.length + 1, true),
      ...columns.flatMap((column, place) => (hidden.has(place) ? [] : [heading(column.title, column.unit, column.meaning, place, false)])),
      heading("numerics", "", "how the check against eager ended, and how much of the tolerance its worst gap took", columns.length, true));
    const offered = allRows.filter((row) => unusable?.checked || row.status === "ok");
    const rows = offered.filter(matcher(filterText, columns)).sort(compare);
    matching = filterText.trim() ? rows : null;
    body.replaceChildren(...rows.slice(0, shown).map(rowOf));
    count.textContent = `${rows.length === offered.length ? rows.length : `${rows.length} of ${offered.length}`} ${offered.length === 1 ? "setting" : "settings"}`
      + (rows.length > shown ? `, the first ${shown} shown` : "");
    more.hidden = rows.length <= shown;
  };

  const inputs = [...document.querySelectorAll("input.filter")];
  const filter = (text) => {
    filterText = text;
    kept.write("filter", text);
    inputs.forEach((input) => { if (input.value !== text) input.value = text; });
    shown = pageOfRows;
    fill();
    const parallel = chartOf("parallel-chart");
    if (parallel?.isDrawn) parallel.draw();
  };
  inputs.forEach((input) => {
    input.value = filterText;
    input.addEventListener("input", () => filter(input.value));
  });
  addEventListener("toggle-term", ({ detail }) => {
    const words = filterText.split(/\s+/).filter(Boolean);
    filter((words.includes(detail) ? words.filter((word) => word !== detail) : [...words, detail]).join(" "));
  });
  unusable?.addEventListener("change", fill);
  more.addEventListener("click", () => {
    const before = shown;
    shown += pageOfRows;
    fill();
    body.rows[before]?.querySelector("button").focus();
  });
  fill();
};
