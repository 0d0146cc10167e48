// Figures as text and tables: tiles, sentences, details of a stage, stages, devices, planners.
"use strict";

GP.tables = (() => {
  const { make, byId, stageColour } = GP.dom;
  const { time, bytes, percent, count, number, ranks } = GP.format;
  let data = null;

  function draw(loaded) {
    data = loaded;
    byId("model-name").textContent = data.model || "Unnamed model";
    const parts = [data.planner ? `planned by ${data.planner}` : "", data.cluster, `mini-batch of ${count(data.batch_size, "sample")}`,
      count(data.stages.length, "stage"), data.copies > 1 ? `${data.copies} copies` : "", data.builder ? `schedule ${data.builder}` : ""];
    byId("subtitle").textContent = parts.filter(Boolean).join(" · ");
    tiles();
    words();
    stages();
    devices();
    comparison();
    details(null);
    byId("footer").textContent = data.fingerprint ? `Graph ${data.fingerprint}. Made by GraphPipe; the file needs no connection.` : "Made by GraphPipe; the file needs no connection.";
  }

  function tiles() {
    const timeline = data.timelines[0];
    const tile = (label, value, note) => byId("tiles").append(make("div", { class: "tile" },
      make("dt", {}, label), make("dd", {}, value), make("dd", { class: "note" }, note)));
    const other = data.timelines[1], word = other ? other.label.toLowerCase() : "";
    tile("Iteration", time(timeline.iteration_ns), other ? `${word} ${time(other.iteration_ns)}` : "predicted");
    const rate = (ns) => (ns ? number((data.batch_size / ns) * 1e9) : "–");
    tile("Samples a second", rate(timeline.iteration_ns), other ? `${word} ${rate(other.iteration_ns)}` : "predicted");
    tile("Bubble", percent(timeline.bubble), "idle share of the devices in use");
    const slowest = timeline.uses[timeline.bottleneck];
    tile("Bottleneck", `device ${timeline.bottleneck}`, `busy ${time(slowest.busy_ns)}`);
    if (timeline.peak_memory.length) {
      const share = timeline.peak_memory.map((peak, rank) => peak / data.devices[rank].memory);
      const rank = d3.maxIndex(share);
      tile("Peak memory", bytes(timeline.peak_memory[rank]), `${percent(share[rank])} of device ${rank}`);
    }
    tile("Depth", String(data.depth), `of ${count(data.stages.length, "stage")}, on the longest path`);
    if (data.lower_bound_ns) {
      tile("Above the lower bound", percent(timeline.iteration_ns / data.lower_bound_ns - 1), `no plan takes less than ${time(data.lower_bound_ns)}`);
    }
  }

  function words() {
    byId("words").append(...data.words.map((text) => make("li", {}, text)),
      ...data.words_measured.map((text) => make("li", { class: "measured" }, `${data.timelines[1].label}: ${text}`)));
    byId("notes").append(...data.notes.map((text) => make("p", { class: "note-box" }, text)));
  }

  // A table of [header, align, cell(row)] columns.
  function table(columns, rows, attributes) {
    const head = make("tr", {}, ...columns.map(([name, side]) => make("th", { class: side, scope: "col" }, name)));
    const body = rows.map((row, i) => make("tr", attributes(row, i),
      ...columns.map(([, side, cell]) => {
        const content = cell(row, i);
        return make("td", { class: side }, content);
      })));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  }

  function stages() {
    const anyPeak = data.timelines[0].peak_in_flight.length > 0;
    const columns = [
      ["Stage", "left", (s) => make("span", { "--stage-colour": stageColour(s.id), "data-stage": s.id }, make("i", { class: "swatch" }), `${s.id}  ${s.name}`)],
      ["Devices", "left", (s) => ranks(s.devices)], ["Micro-batch", "", (s) => number(s.micro_batch)], ["Replicas", "", (s) => String(s.replicas)],
      ["Block k", "", (s) => String(s.block)], ["In flight", "", (s) => number(s.in_flight)],
      ...(anyPeak ? [["Seen at most", "", (s) => number(data.timelines[0].peak_in_flight[s.id])]] : []),
      ["Forward", "", (s) => time(GP.model.timesOf(data, s)[0])],
      ["Backward", "", (s) => (s.has_backward ? time(GP.model.timesOf(data, s)[1]) : "none")], ["Recompute", "", (s) => (s.recompute ? "yes" : "no")],
      ["Per sample", "", (s) => time(GP.model.timePerSample(data, s))], ["Parameters", "", (s) => bytes(s.memory.parameters)],
      ["With gradients, optimizer", "", (s) => bytes(s.memory.static)], ["Saved per micro-batch", "", (s) => bytes(s.memory.saved_per_micro_batch)],
    ];
    byId("stages").append(table(columns, data.stages, (s) => ({ class: "pick", "data-stage": s.id, onclick: () => GP.selection.pickStage(s.id) })));
  }

  const SHARES = [["forward_ns", "--forward"], ["recompute_ns", "--recompute"], ["backward_ns", "--backward"], ["all_reduce_ns", "--all-reduce"], ["optimizer_ns", "--optimizer"]];

  function stack(use, total) {
    return make("div", { class: "stack" }, ...SHARES.map(([field, colourName]) => {
      const piece = make("i");
      piece.style.width = `${total ? (100 * use[field]) / total : 0}%`;
      piece.style.background = `var(${colourName})`;
      return piece;
    }));
  }

  function devices() {
    for (const timeline of data.timelines) {
      const uses = timeline.uses;
      const columns = [
        ["Device", "left", (u) => `${u.rank}${u.rank === timeline.bottleneck ? " (bottleneck)" : ""}`],
        ["Kind, node", "left", (u) => `${data.devices[u.rank].kind}, ${data.devices[u.rank].node}`],
        ["Stages", "left", (u) => u.stages.map((s) => `${s} ${data.stages[s].name}`).join(", ") || "none"],
        ["Use of time", "left", (u) => stack(u, timeline.iteration_ns)],
        ["Busy", "", (u) => percent(timeline.iteration_ns ? u.busy_ns / timeline.iteration_ns : 0)],
        ["Forward", "", (u) => time(u.forward_ns)], ["Recompute", "", (u) => time(u.recompute_ns)], ["Backward", "", (u) => time(u.backward_ns)],
        ["All-reduce", "", (u) => time(u.all_reduce_ns)], ["Optimizer", "", (u) => time(u.optimizer_ns)],
        ["Idle before", "", (u) => time(u.fill_ns)], ["between", "", (u) => time(u.wait_ns)], ["after", "", (u) => time(u.drain_ns)],
        ["Sent", "", (u) => bytes(u.sent_bytes)], ["Received", "", (u) => bytes(u.received_bytes)],
        ...(timeline.peak_memory.length ? [["Peak memory", "", (u) => bytes(timeline.peak_memory[u.rank])]] : []),
        ["Capacity", "", (u) => bytes(data.devices[u.rank].memory)],
      ];
      if (data.timelines.length > 1) byId("devices").append(make("h3", {}, timeline.label));
      byId("devices").append(table(columns, uses, (u) => ({ "data-rank": u.rank })));
    }
  }

  function comparison() {
    const section = byId("comparison-section");
    if (!data.comparison.length) { section.hidden = true; return; }
    const ours = { planner: `${data.planner || "this plan"} (this plan)`, variant: "", iteration_ns: data.timelines[0].iteration_ns, bubble: data.timelines[0].bubble,
      depth: data.depth, peak_memory_bytes: data.timelines[0].peak_memory.length ? Math.max(...data.timelines[0].peak_memory) : null, search_seconds: null, note: "", ours: true };
    const rows = [ours, ...data.comparison];
    const rate = (row) => (row.iteration_ns ? data.batch_size / row.iteration_ns * 1e9 : 0);
    const top = Math.max(...rows.map(rate));
    const or = (value, show) => (value === null || value === undefined ? "–" : show(value));
    const columns = [
      ["Planner", "left", (r) => r.planner], ["Variant", "left", (r) => r.variant],
      ["Throughput", "left", (r) => { const fill = make("i"); fill.style.width = `${(100 * rate(r)) / top}%`; fill.style.background = r.ours ? "var(--accent)" : "var(--optimizer)"; return make("div", { class: "stack" }, fill); }],
      ["Samples a second", "", (r) => or(r.iteration_ns, () => number(rate(r)))], ["Iteration", "", (r) => or(r.iteration_ns, time)],
      ["This plan is", "", (r) => or(r.iteration_ns, (ns) => (r.ours ? "1" : `${(ns / ours.iteration_ns).toFixed(2)} × as fast`))],
      ["Bubble", "", (r) => or(r.bubble, percent)], ["Depth", "", (r) => or(r.depth, String)], ["Peak memory", "", (r) => or(r.peak_memory_bytes, bytes)],
      ["Search", "", (r) => or(r.search_seconds, (s) => time(s * 1e9))], ["Note", "left wrap", (r) => r.note],
    ];
    byId("comparison").append(table(columns, rows, (r) => ({ class: r.ours ? "ours" : "" })));
  }

  function pairs(list) {
    return make("dl", {}, ...list.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
  }

  function details(stage) {
    const box = byId("details");
    if (stage === null) {
      box.replaceChildren(make("h3", {}, "No stage picked"),
        make("p", { class: "muted" }, "A card shows a stage: the modules it holds, its devices, its micro-batch size, its times for one micro-batch, its load against the slowest stage, and its memory with all its samples in flight."),
        make("p", { class: "muted" }, "Pick one for everything the plan says of it."));
      return;
    }
    const s = data.stages[stage], m = s.memory;
    const kinds = Object.entries(s.times).map(([kind, [f, b]]) => [kind, `forward ${time(f)}, backward ${time(b)}`]);
    const edges = data.edges.filter((e) => e.source === stage || e.target === stage).map((e) => {
      const other = e.source === stage ? `to ${e.target} ${data.stages[e.target].name}` : `from ${e.source} ${data.stages[e.source].name}`;
      return make("li", {}, `${other}: ${bytes(e.bytes_per_sample)} a sample, gradient ${bytes(e.gradient_bytes_per_sample)}`);
    });
    const inputs = data.inputs.filter((i) => i.stages.includes(stage)).map((i) => make("li", {}, `${i.path}: ${i.dtype} [${i.shape.join(" × ")}]`));
    box.replaceChildren(make("h3", {}, `Stage ${stage}: ${s.name}`),
      pairs([["Devices", ranks(s.devices)], ["Micro-batch", count(s.micro_batch, "sample")], ["Replicas", String(s.replicas)], ["Block k", String(s.block)],
        ["In flight, at most", count(s.in_flight, "sample")], ["Recompute", s.recompute ? "yes" : "no"], ["Time per sample", time(GP.model.timePerSample(data, s))]]),
      make("h4", {}, "Time of one micro-batch"), pairs(kinds),
      make("h4", {}, "Memory on each device"),
      pairs([["Parameters", bytes(m.parameters)], ["Gradients", bytes(m.gradients)], ["Optimizer", bytes(m.optimizer)], ["Saved per micro-batch", bytes(m.saved_per_micro_batch)],
        ["While recomputing", bytes(m.recompute)], ["Workspace", bytes(m.workspace)]]),
      ...(s.modules.length ? [make("h4", {}, "Modules"), make("ul", {}, ...s.modules.map((name) => make("li", {}, name)))] : []),
      ...(edges.length ? [make("h4", {}, "Edges"), make("ul", {}, ...edges)] : []),
      ...(inputs.length ? [make("h4", {}, "Inputs it reads"), make("ul", {}, ...inputs)] : []),
      make("details", {}, make("summary", {}, count(s.ops.length, "op")), make("ul", {}, ...s.ops.map((name) => make("li", {}, name)))));
    box.scrollTop = 0;
  }

  function update(state) {
    details(state.stage);
    byId("clear-selection").disabled = state.stage === null;
    for (const row of document.querySelectorAll("#stages tbody tr")) row.classList.toggle("selected", Number(row.dataset.stage) === state.stage && state.stage !== null);
    for (const row of document.querySelectorAll("#devices tbody tr")) {
      const hosts = state.stage !== null && data.stages_of_device[Number(row.dataset.rank)].includes(state.stage);
      row.classList.toggle("selected", hosts);
      row.classList.toggle("dimmed", state.stage !== null && !hosts);
    }
  }

  return { draw, update };
})();
