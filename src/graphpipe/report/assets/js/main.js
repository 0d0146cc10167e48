// Starts the page: draws every panel once and keeps them together.
"use strict";

GP.main = (() => {
  const { make, byId } = GP.dom;
  const { time, count } = GP.format;
  const LEGEND = [["forward", "forward"], ["backward", "backward"], ["recompute", "recompute"], ["all-reduce", "all-reduce"], ["optimizer", "optimizer"],
    ["sent", "message sent"], ["received", "message received"], ["idle", "idle"], ["follow", "followed samples"]];
  let data = null;

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    GP.paint.refresh();
    if (!data) return;
    GP.graph.recolour();
    GP.timeline.repaint();
    GP.memory.repaint();
  }

  function legend() {
    byId("legend").append(...LEGEND.map(([name, text]) => {
      const swatch = make("i");
      swatch.style.background = `var(--${name})`;
      return make("span", {}, swatch, text);
    }));
  }

  // What became of the followed samples, in the predicted timeline.
  function followWords(samples) {
    if (!samples) return "";
    const { events } = data.timelines[0];
    let first = Infinity, last = 0, found = 0, where = "";
    for (let i = 0; i < events.count; i += 1) {
      if (events.stage[i] < 0) continue;
      const range = GP.model.samplesOf(data, events.stage[i], events.microBatch[i], events.rank[i]);
      if (!GP.paint.overlaps(samples, range)) continue;
      found += 1;
      first = Math.min(first, events.start[i]);
      if (events.end[i] > last) { last = events.end[i]; where = data.stages[events.stage[i]].name; }
    }
    const name = samples[1] - samples[0] === 1 ? `sample ${samples[0]}` : `samples ${samples[0]} to ${samples[1] - 1}`;
    return found ? `Following ${name}: ${count(found, "task")} from ${time(first)} to ${time(last)}, the last in ${where}.` : `No task covers ${name}.`;
  }

  function wire() {
    GP.selection.listen((state) => {
      GP.graph.update(state);
      GP.memory.update(state);
      GP.tables.update(state);
      byId("follow-status").textContent = followWords(state.samples);
      byId("follow-clear").disabled = !state.samples;
      if (!state.samples) byId("follow-sample").value = "";
      GP.timeline.repaint();
    });
    byId("clear-selection").addEventListener("click", () => GP.selection.clear());
    byId("follow-clear").addEventListener("click", () => GP.selection.follow(null));
    byId("follow-sample").max = data.batch_size - 1;
    byId("follow-sample").addEventListener("input", (event) => {
      const sample = event.target.valueAsNumber;
      if (Number.isInteger(sample) && sample >= 0 && sample < data.batch_size) GP.selection.follow([sample, sample + 1]);
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") GP.selection.clear(); });
    byId("theme-button").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
    byId("print-button").addEventListener("click", () => window.print());
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
    let before = "light";
    window.addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme("light"); });
    window.addEventListener("afterprint", () => setTheme(before));
  }

  function start() {
    setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    data = GP.model.load();
    legend();
    GP.tables.draw(data);
    GP.graph.draw(data);
    GP.memory.draw(data);
    GP.timeline.draw(data, (span) => GP.memory.setSpan(span));
    wire();
    document.documentElement.dataset.ready = "true";
  }

  start();
  return { followWords };
})();
