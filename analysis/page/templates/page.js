// The page begins: everything is unpacked, the table and the first chart are there, the other charts follow.

document.getElementById("theme").addEventListener("click", window.toggleTheme);

// While a sweep runs, its server says when there is something new.
const watch = () => {
  const every = 2000; // ms
  const note = document.getElementById("live");
  const look = async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const [version, problem] = (await answer.text()).split("\n");
      if (version !== root.dataset.version) {
        if (!document.querySelector(".hovertext, input:focus, button:focus")) {
          location.reload();
          return;
        }
        note.textContent = "new trials have finished; the page follows when you are done here";
      } else note.textContent = problem ? `not up to date: ${problem}` : "watching";
    } catch {
      note.textContent = "the server of this page has ended";
    }
    setTimeout(look, every);
  };
  setTimeout(look, every);
};

// Commands name the sweep's folder where the page knows it: a file lies in it.
const folder = (() => {
  if (location.protocol !== "file:") return "DIR";
  const path = decodeURIComponent(location.pathname).replace(/\/[^/]*$/, "") || "/";
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
})();
const inFolder = (words) => words.replace(" DIR", () => ` ${folder}`);
const setUpCommands = () => {
  for (const button of document.querySelectorAll(".copy-command")) {
    const code = document.getElementById(button.dataset.from);
    code.textContent = inFolder(code.textContent);
    copyOnClick(button, () => code.textContent);
  }
};

(async () => {
  const data = unpacked("data").then(JSON.parse);
  const plotly = unpacked("plotly");
  const { figures, table, break_even: breakEven } = await data;
  setUpTrials(table);
  setUpCommands();
  run(await plotly);
  setUpCharts(figures);
  finishPage = () => {
    finishPage = () => {};
    if (breakEven) setUpBreakEven(breakEven, figures["break-even"]);
  };
  drawNext();
  await painted(); // the front, before more is worked out
  finishPage();
  drawInTurn();
  matchMedia("print").addEventListener("change", (event) => (event.matches ? beforePrint() : afterPrint()));
  if (root.dataset.version) watch();
})();
