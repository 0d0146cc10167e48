// The timelines, predicted and measured: one row a device, drawn on a canvas each, zoomed together.
"use strict";

GP.timeline = (() => {
  const { make, byId, showTip, hideTip } = GP.dom;
  const { GUTTER, AXIS } = GP.paint;
  let data = null, charts = [], transform = d3.zoomIdentity, zoom = null, onSpan = () => {}, pending = false;

  function rowHeight() {
    return Math.max(17, Math.min(38, Math.floor(640 / data.world_size)));
  }

  function draw(loaded, spanListener) {
    data = loaded;
    onSpan = spanListener;
    zoom = d3.zoom().scaleExtent([1, 1e5])
      .filter((event) => !event.button && (event.type !== "wheel" || event.ctrlKey || event.metaKey))
      .on("zoom", (event) => { if (event.sourceEvent) setTransform(event.transform); });
    charts = data.timelines.map((timeline, index) => addChart(timeline, index));
    resize();
    new ResizeObserver(resize).observe(byId("timelines"));
    byId("zoom-in").addEventListener("click", () => zoomBy(2));
    byId("zoom-out").addEventListener("click", () => zoomBy(0.5));
    byId("zoom-fit").addEventListener("click", () => setTransform(d3.zoomIdentity));
    for (const id of ["colour-by", "show-messages"]) byId(id).addEventListener("change", repaint);
  }

  function addChart(timeline, index) {
    const name = timeline.label;
    const summary = `${name} timeline: ${GP.format.time(timeline.iteration_ns)} on ${GP.format.count(data.world_size, "device")}, `
      + `bubble ${GP.format.percent(timeline.bubble)}. The table of devices has the same times as numbers.`;
    const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": summary, "data-timeline": index });
    byId("timelines").append(make("div", { class: "timeline" },
      make("h3", {}, `${name} `, make("small", {}, `${GP.format.time(timeline.iteration_ns)}, bubble ${GP.format.percent(timeline.bubble)}`)),
      canvas));
    const chart = { canvas, timeline, row: rowHeight(), height: AXIS + rowHeight() * data.world_size };
    const picked = d3.select(canvas);
    picked.call(zoom).on("dblclick.zoom", null);
    picked.on("mousemove.tip", (event) => hover(chart, event)).on("mouseleave.tip", hideTip)
      .on("click.follow", (event) => click(chart, event)).on("keydown", keyboard);
    return chart;
  }

  function resize() {
    for (const chart of charts) {
      chart.width = chart.canvas.parentElement.clientWidth;
      chart.canvas.style.height = `${chart.height}px`;
      const ratio = window.devicePixelRatio || 1;
      chart.canvas.width = Math.round(chart.width * ratio);
      chart.canvas.height = Math.round(chart.height * ratio);
    }
    zoom.translateExtent([[GUTTER, 0], [charts[0].width - 8, 1]]).extent([[GUTTER, 0], [charts[0].width - 8, 1]]);
    repaint();
  }

  function scale(chart) {
    return transform.rescaleX(d3.scaleLinear([0, data.maxTime], [GUTTER, chart.width - 8]));
  }

  function setTransform(next) {
    transform = next;
    for (const chart of charts) d3.select(chart.canvas).property("__zoom", next);
    if (pending) return;
    // Many moves of the pointer, one painting a frame.
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      repaint();
      onSpan(scale(charts[0]).domain());
    });
  }

  function zoomBy(factor) {
    const { width } = charts[0];
    const middle = (GUTTER + width - 8) / 2;
    const k = Math.max(1, Math.min(1e5, transform.k * factor));
    const x = middle - (middle - transform.x) * (k / transform.k);
    setTransform(clamped(d3.zoomIdentity.translate(x, 0).scale(k)));
  }

  // Keeps the iteration's ends at or outside of the chart's.
  function clamped(next) {
    const right = charts[0].width - 8;
    const x = Math.min(GUTTER - GUTTER * next.k, Math.max(right - right * next.k, next.x));
    return d3.zoomIdentity.translate(x, 0).scale(next.k);
  }

  function keyboard(event) {
    const step = { ArrowLeft: 120, ArrowRight: -120 }[event.key];
    if (step) setTransform(clamped(d3.zoomIdentity.translate(transform.x + step, 0).scale(transform.k)));
    else if (event.key === "+" || event.key === "=") zoomBy(1.5);
    else if (event.key === "-") zoomBy(1 / 1.5);
    else if (event.key === "0") setTransform(d3.zoomIdentity);
    else return;
    event.preventDefault();
  }

  function repaint() {
    const options = { byStage: byId("colour-by").value === "stage", messages: byId("show-messages").checked };
    for (const chart of charts) GP.paint.chart(data, chart, scale(chart), GP.selection.state, options);
  }

  // The index of the last of the values[from..to) that is at most x, or from - 1.
  function lastAtMost(values, x, from, to) {
    let low = from, high = to;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  // What lies under the pointer: {rank}, {event} or {transfer}.
  function hit(chart, event) {
    const [x, y] = d3.pointer(event, chart.canvas);
    const rank = Math.floor((y - AXIS) / chart.row);
    if (rank < 0 || rank >= data.world_size) return null;
    if (x < GUTTER) return { rank, gutter: true };
    const at = scale(chart).invert(x), reach = (scale(chart).invert(x + 3) - at);
    const { events, transfers } = chart.timeline;
    const inRow = (y - AXIS) - rank * chart.row;
    if (byId("show-messages").checked && inRow > chart.row - GP.paint.STRIP - 2) {
      const low = inRow > chart.row - GP.paint.STRIP / 2 - 1;
      const near = (low ? transfers.received : transfers.sent)[rank]
        .filter((i) => transfers.start[i] - reach <= at && at <= transfers.end[i] + reach);
      if (near.length) return { rank, transfer: near[near.length - 1] };
    }
    const i = lastAtMost(events.start, at, events.first[rank], events.first[rank + 1]);
    return i >= events.first[rank] && events.end[i] >= at - reach ? { rank, event: i } : { rank };
  }

  function hover(chart, event) {
    const found = hit(chart, event);
    if (!found || event.buttons) { hideTip(); return; }
    const { title, lines } = GP.paint.describe(data, chart.timeline, found);
    if (title) showTip(event, title, lines); else hideTip();
  }

  function click(chart, event) {
    if (event.defaultPrevented) return;
    const found = hit(chart, event);
    if (!found) return;
    if (found.gutter) pickHosted(found.rank);
    else if (found.event !== undefined && chart.timeline.events.stage[found.event] >= 0) {
      const { stage, microBatch } = chart.timeline.events;
      GP.selection.follow(GP.model.samplesOf(data, stage[found.event], microBatch[found.event], found.rank));
    } else GP.selection.follow(null);
  }

  // A click on a device's label picks its stage; where it hosts several, one after the other.
  function pickHosted(rank) {
    const hosted = data.stages_of_device[rank];
    if (!hosted.length) return;
    const next = hosted[hosted.indexOf(GP.selection.state.stage) + 1];
    GP.selection.pickStage(next === undefined ? hosted[0] : next);
  }

  return { draw, repaint };
})();
