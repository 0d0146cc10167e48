// The stage graph: laid out in layers by dagre, branches side by side, drawn as SVG.
"use strict";

GP.graph = (() => {
  const { make, byId, stageColour, showTip, hideTip } = GP.dom;
  const FULL = { width: 264, height: 132 }, COMPACT = { width: 200, height: 62 };
  const MANY = 20;
  let view = null;

  const cardSize = (data) => (data.stages.length > MANY ? COMPACT : FULL);

  function layout(data, direction) {
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    graph.setGraph({ rankdir: direction, nodesep: 34, ranksep: data.stages.length > MANY ? 34 : 58, edgesep: 20, marginx: 24, marginy: 24 });
    for (const stage of data.stages) graph.setNode(String(stage.id), { ...cardSize(data) });
    data.edges.forEach((edge, i) => {
      graph.setEdge(String(edge.source), String(edge.target), { width: 84, height: 18, labelpos: "c" }, String(i));
    });
    dagre.layout(graph);
    return graph;
  }

  // Top to bottom or left to right: whichever shows the cards larger.
  function best(data, width, height) {
    const scale = (graph) => Math.min(width / graph.graph().width, height / graph.graph().height);
    const [down, right] = [layout(data, "TB"), layout(data, "LR")];
    return scale(down) >= scale(right) ? down : right;
  }

  function bar(label, share, text, colourName) {
    const fill = make("i");
    fill.style.width = `${Math.min(100, share * 100)}%`;
    fill.style.background = `var(${colourName})`;
    return [make("span", {}, label), make("span", { class: "bar" }, fill), make("span", {}, text)];
  }

  function card(data, stage, slowest) {
    const { time, bytes, ranks, percent } = GP.format;
    const [forward, backward] = GP.model.timesOf(data, stage);
    const used = GP.model.memoryOf(stage);
    const capacity = data.devices[stage.devices[0]].memory;
    const badges = [];
    if (stage.recompute) badges.push(make("span", { class: "badge" }, "recompute"));
    if (!stage.has_backward) badges.push(make("span", { class: "badge" }, "no backward"));
    const replicas = stage.replicas > 1 ? ` × ${stage.replicas} replicas` : "";
    const load = slowest ? GP.model.timePerSample(data, stage) / slowest : 0;
    const many = data.stages.length > MANY;
    const bars = make("div", { class: "bars" },
      ...bar("load", load, percent(load), "--forward"),
      ...(many ? [] : bar("memory", used / capacity, bytes(used), "--activations")));
    bars.addEventListener("mousemove", (event) => showTip(event, `Stage ${stage.id}: ${stage.name}`, [
      `load: its time per sample is ${percent(load)} of the slowest stage's`,
      `memory: ${bytes(used)} of ${bytes(capacity)} with ${GP.format.count(stage.in_flight, "sample")} in flight`,
    ]));
    bars.addEventListener("mouseleave", hideTip);
    const size = `micro-batch ${stage.micro_batch}${replicas}`, place = `device${stage.devices.length > 1 ? "s" : ""} ${ranks(stage.devices)}`;
    const lines = many ? [make("div", {}, `${place}, ${size}`)] : [
      make("div", { class: "muted" }, stage.modules.join(", ") || GP.format.count(stage.ops.length, "op")),
      make("div", {}, place), make("div", {}, size),
      make("div", { class: "muted" }, stage.has_backward
        ? `forward ${time(forward)}, backward ${time(backward)}` : `forward ${time(forward)}`)];
    return make("div", {
      class: "stage-card", tabindex: "0", role: "button", "aria-pressed": "false", "data-stage": stage.id,
      "aria-label": `Stage ${stage.id}, ${stage.name}`, "--stage-colour": stageColour(stage.id),
      onclick: () => GP.selection.pickStage(stage.id),
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        GP.selection.pickStage(stage.id);
      },
    },
      make("div", { class: "name" }, `${stage.id}  ${stage.name}`, ...badges),
      ...lines,
      bars);
  }

  function edgeLabel(edge) {
    const { bytes } = GP.format;
    if (edge.bytes_per_sample) return bytes(edge.bytes_per_sample);
    return edge.fixed_bytes ? `${bytes(edge.fixed_bytes)} fixed` : "0 B";
  }

  function edgeTip(data, edge) {
    const { bytes } = GP.format;
    const lines = edge.tensors.slice(0, 8).map((t) => `${t.name}: ${t.dtype} [${t.shape.join(" × ")}]${t.gradient ? "" : ", no gradient"}`);
    if (edge.tensors.length > 8) lines.push(`and ${edge.tensors.length - 8} more tensors`);
    lines.push(`forward ${bytes(edge.bytes_per_sample)} a sample, ${bytes(edge.fixed_bytes)} fixed`);
    lines.push(`backward ${bytes(edge.gradient_bytes_per_sample)} a sample, ${bytes(edge.gradient_fixed_bytes)} fixed`);
    return [`${data.stages[edge.source].name} → ${data.stages[edge.target].name}`, lines];
  }

  function drawEdges(root, graph, data) {
    const heaviest = Math.max(1, ...data.edges.map((edge) => edge.bytes_per_sample));
    const line = d3.line((p) => p.x, (p) => p.y).curve(d3.curveBasis);
    const items = graph.edges().map((key) => ({ ...graph.edge(key), edge: data.edges[Number(key.name)] }));
    const group = root.append("g").selectAll("g").data(items).join("g")
      .attr("class", "edge").attr("data-source", (d) => d.edge.source).attr("data-target", (d) => d.edge.target);
    group.append("path").attr("d", (d) => line(d.points)).attr("marker-end", "url(#arrow)")
      .attr("stroke-width", (d) => 1.4 + 2.6 * Math.sqrt(d.edge.bytes_per_sample / heaviest));
    group.append("path").attr("class", "hit").attr("d", (d) => line(d.points));
    const half = (d) => edgeLabel(d.edge).length * 3.4 + 5;
    group.append("rect").attr("x", (d) => d.x - half(d)).attr("y", (d) => d.y - 9).attr("width", (d) => 2 * half(d)).attr("height", 18).attr("rx", 5);
    group.append("text").attr("x", (d) => d.x).attr("y", (d) => d.y).text((d) => edgeLabel(d.edge));
    group.on("mousemove", (event, d) => showTip(event, ...edgeTip(data, d.edge))).on("mouseleave", hideTip);
  }

  function drawCards(root, graph, data) {
    const { width, height } = cardSize(data);
    const slowest = Math.max(...data.stages.map((stage) => GP.model.timePerSample(data, stage)));
    root.append("g").selectAll("foreignObject").data(data.stages).join("foreignObject")
      .attr("x", (s) => graph.node(String(s.id)).x - width / 2).attr("y", (s) => graph.node(String(s.id)).y - height / 2)
      .attr("width", width).attr("height", height)
      .append((stage) => card(data, stage, slowest));
  }

  function draw(data) {
    const holder = byId("graph");
    const width = holder.clientWidth || 900, tallest = data.stages.length > MANY ? 1200 : 800;
    const graph = best(data, width, tallest);
    const size = graph.graph();
    const height = Math.round(Math.min(tallest, Math.max(420, Math.min(1, width / size.width) * size.height)));
    holder.style.height = `${height}px`;
    byId("details").style.maxHeight = `${Math.min(height, 800)}px`;
    const svg = d3.select(holder).append("svg").attr("viewBox", `0 0 ${width} ${height}`);
    svg.append("defs").append("marker").attr("id", "arrow").attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4)
      .attr("markerWidth", 8).attr("markerHeight", 8).attr("markerUnits", "userSpaceOnUse").attr("orient", "auto")
      .append("path").attr("class", "arrow").attr("d", "M0,0 L8,4 L0,8 z");
    const root = svg.append("g");
    drawEdges(root, graph, data);
    drawCards(root, graph, data);
    const zoom = d3.zoom().scaleExtent([0.05, 2.5])
      .filter((event) => !event.button && (event.type !== "wheel" || event.ctrlKey || event.metaKey))
      .on("zoom", (event) => root.attr("transform", event.transform));
    svg.call(zoom).on("dblclick.zoom", null);
    view = { svg, zoom, size, width, height };
    fit();
    byId("graph-fit").addEventListener("click", fit);
  }

  function fit() {
    const { svg, zoom, size, width, height } = view;
    const scale = Math.min(1.15, width / size.width, height / size.height);
    const x = (width - size.width * scale) / 2, y = (height - size.height * scale) / 2;
    svg.call(zoom.transform, d3.zoomIdentity.translate(x, y).scale(scale));
  }

  function update(state) {
    for (const node of document.querySelectorAll(".stage-card")) {
      const on = Number(node.dataset.stage) === state.stage && state.stage !== null;
      node.classList.toggle("selected", on);
      node.setAttribute("aria-pressed", String(on));
    }
    for (const node of document.querySelectorAll(".edge")) {
      const ends = [Number(node.dataset.source), Number(node.dataset.target)];
      node.classList.toggle("touching", state.stage !== null && ends.includes(state.stage));
    }
  }

  function recolour() {
    for (const node of document.querySelectorAll("[data-stage]")) {
      if (node.style.getPropertyValue("--stage-colour")) node.style.setProperty("--stage-colour", stageColour(Number(node.dataset.stage)));
    }
  }

  return { draw, update, recolour };
})();
