// Memory of each device over the span of time that the timeline shows.
"use strict";

GP.memory = (() => {
  const { make, byId, colour, showTip, hideTip } = GP.dom;
  let data = null, cards = [], span = [0, 1];

  function draw(loaded) {
    data = loaded;
    span = [0, data.maxTime];
    const timeline = data.timelines[0];
    cards = timeline.memory.map((steps, rank) => addCard(timeline, steps, rank)).filter((card) => card !== null);
    if (!cards.length) byId("memory-section").hidden = true;
    const observer = new ResizeObserver(repaint);
    observer.observe(byId("memory"));
  }

  function addCard(timeline, steps, rank) {
    const hosted = data.stages_of_device[rank];
    if (!hosted.length) return null;
    const { bytes, percent } = GP.format;
    const capacity = data.devices[rank].memory;
    const peak = timeline.peak_memory.length ? timeline.peak_memory[rank] : Math.max(...steps.bytes);
    const canvas = make("canvas", { role: "img", "aria-label": `Memory of device ${rank}: at most ${bytes(peak)} of ${bytes(capacity)}` });
    const node = make("div", { class: "memory-card", "data-rank": rank },
      make("header", {}, make("b", {}, `device ${rank}`), make("span", {}, hosted.map((s) => data.stages[s].name).join(" + "))),
      canvas,
      make("div", { class: peak > capacity ? "peak over" : "peak" }, `peak ${bytes(peak)} of ${bytes(capacity)} (${percent(peak / capacity)})`));
    byId("memory").append(node);
    const card = { node, canvas, steps, rank, capacity, peak, fixed: data.devices[rank].static };
    if (isSmall(card)) node.append(make("div", { class: "peak" }, "the capacity is above the chart"));
    canvas.addEventListener("mousemove", (event) => hover(card, event));
    canvas.addEventListener("mouseleave", hideTip);
    return card;
  }

  // Where a twentieth of the capacity is used, a chart up to the capacity would show a line.
  const isSmall = (card) => card.peak * 20 < card.capacity;

  // Index of the step in force at a time.
  const stepAt = (steps, at) => Math.max(0, d3.bisectRight(steps.times, at) - 1);

  function paint(card) {
    const { canvas, steps, capacity, peak, fixed } = card;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const x = d3.scaleLinear(span, [0, width]);
    const top = isSmall(card) ? peak * 1.3 : Math.max(capacity, peak) * 1.04;
    const y = d3.scaleLinear([0, top], [height, 0]);
    context.fillStyle = colour("--idle");
    context.fillRect(0, Math.max(0, y(capacity)), width, height);
    context.fillStyle = colour("--activations");
    for (let pixel = 0; pixel < width; pixel += 1) {
      let level = 0;
      const last = stepAt(steps, x.invert(pixel + 1));
      // Several steps may share one time: the peak of that moment is one of them.
      for (let i = Math.max(0, d3.bisectLeft(steps.times, x.invert(pixel)) - 1); i <= last; i += 1) level = Math.max(level, steps.bytes[i]);
      context.fillRect(pixel, y(level), 1, height - y(level));
    }
    context.fillStyle = colour("--static");
    context.fillRect(0, y(fixed), width, height - y(fixed));
    context.fillStyle = colour("--capacity");
    for (let dash = 0; dash < width; dash += 8) context.fillRect(dash, y(capacity) - 1, 5, 1.5);
  }

  function hover(card, event) {
    const at = d3.scaleLinear(span, [0, card.canvas.clientWidth]).invert(d3.pointer(event, card.canvas)[0]);
    const { bytes, time } = GP.format;
    const level = card.steps.bytes[stepAt(card.steps, at)];
    showTip(event, `Device ${card.rank} at ${time(at)}`, [`${bytes(level)} in use`,
      `${bytes(card.fixed)} parameters, gradients, optimizer state`, `${bytes(level - card.fixed)} activations and workspace`,
      `capacity ${bytes(card.capacity)}`]);
  }

  function repaint() { cards.forEach(paint); }

  function update(state) {
    for (const { node, rank } of cards) {
      const hosts = state.stage !== null && data.stages_of_device[rank].includes(state.stage);
      node.classList.toggle("selected", hosts);
      node.classList.toggle("dimmed", state.stage !== null && !hosts);
    }
  }

  return { draw, repaint, update, setSpan: (next) => { span = next; repaint(); } };
})();
