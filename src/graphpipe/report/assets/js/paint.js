// Painting of one timeline: rows, tasks, messages, the path of followed samples.
"use strict";

GP.paint = (() => {
  const GUTTER = 148, AXIS = 26, STRIP = 7;
  const { colour, stageColour } = GP.dom;
  const NAMES = ["forward", "backward", "all-reduce", "optimizer"];
  let palette = null;

  function refresh() {
    palette = {};
    for (const name of ["text", "muted", "line", "card", "idle", "accent", "warn", "follow", "sent", "received",
      "forward", "backward", "recompute", "all-reduce", "optimizer"]) palette[name] = colour(`--${name}`);
    for (const name of ["forward", "backward", "recompute", "all-reduce", "optimizer"]) palette[`${name}-text`] = colour(`--${name}-text`);
  }

  function overlaps(samples, range) {
    return range[0] < samples[1] && samples[0] < range[1];
  }

  function chart(data, chart, x, state, options) {
    if (!palette) refresh();
    const context = chart.canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, chart.width, chart.height);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    rows(context, data, chart, x, state);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, chart.width - GUTTER, chart.height);
    context.clip();
    axis(context, chart, x);
    for (let rank = 0; rank < data.world_size; rank += 1) tasks(context, data, chart, x, rank, state, options);
    if (options.messages) messages(context, data, chart, x, state);
    if (state.samples) path(context, data, chart, x, state.samples);
    context.restore();
  }

  function rows(context, data, chart, x, state) {
    for (let rank = 0; rank < data.world_size; rank += 1) {
      const y = AXIS + rank * chart.row;
      const hosted = data.stages_of_device[rank];
      const slowest = rank === chart.timeline.bottleneck;
      const picked = state.stage !== null && hosted.includes(state.stage);
      context.fillStyle = palette.idle;
      const end = Math.min(chart.width - 8, x(chart.timeline.iteration_ns));
      if (end > GUTTER) context.fillRect(GUTTER, y + 1, end - GUTTER, chart.row - 2);
      context.fillStyle = picked ? palette.accent : slowest ? palette.warn : palette.text;
      context.textAlign = "left";
      context.font = `${picked || slowest ? "600 " : ""}11px system-ui, 'DejaVu Sans', sans-serif`;
      const label = hosted.length ? hosted.map((s) => data.stages[s].name).join(" + ") : "idle";
      const lines = chart.row >= 30 ? [`${slowest ? "▲ " : ""}device ${rank}`, label] : [`${slowest ? "▲ " : ""}${rank}  ${label}`];
      lines.forEach((text, i) => {
        if (i) { context.font = "11px system-ui, 'DejaVu Sans', sans-serif"; context.fillStyle = palette.muted; }
        context.fillText(fitted(context, text, GUTTER - 14), 2, y + (chart.row * (i + 0.5)) / lines.length);
      });
    }
  }

  function fitted(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    let length = text.length;
    while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
    return `${text.slice(0, length)}…`;
  }

  function axis(context, chart, x) {
    const [from, to] = x.domain();
    const ticks = x.ticks(Math.max(2, Math.floor((chart.width - GUTTER) / 110)));
    const [unit, name] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => to >= size) || [1, "ns"];
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : to - from;
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    context.textAlign = "center";
    for (const at of ticks) {
      context.fillStyle = palette.line;
      context.fillRect(Math.round(x(at)), AXIS - 5, 1, chart.height);
      context.fillStyle = palette.muted;
      context.fillText(`${(at / unit).toFixed(digits)} ${name}`, Math.max(GUTTER + 24, Math.min(chart.width - 30, x(at))), AXIS / 2 - 2);
    }
  }

  function fills(data, events, i, byStage) {
    const kind = NAMES[events.kind[i]];
    if (!byStage || events.stage[i] < 0) return [palette[kind], palette[`${kind}-text`]];
    return [stageColour(events.stage[i]), palette.card];
  }

  function tasks(context, data, chart, x, rank, state, options) {
    const { events } = chart.timeline;
    const [from, to] = x.domain();
    const y = AXIS + rank * chart.row + 2;
    const height = chart.row - 4 - (options.messages ? STRIP : 0);
    let painted = -1, paintedColour = "";
    for (let i = events.first[rank]; i < events.first[rank + 1]; i += 1) {
      if (events.end[i] < from) continue;
      if (events.start[i] > to) break;
      const left = x(events.start[i]), right = Math.max(left + 0.5, x(events.end[i]));
      const [fill, ink] = fills(data, events, i, options.byStage);
      const followed = state.samples && events.stage[i] >= 0
        && overlaps(state.samples, GP.model.samplesOf(data, events.stage[i], events.microBatch[i], rank));
      const dim = state.samples ? !followed : state.stage !== null && events.stage[i] !== state.stage;
      if (right - left < 1 && Math.round(right) === painted && fill === paintedColour && !followed) continue;
      painted = Math.round(right);
      paintedColour = fill;
      const gap = right - left > 4 ? 0.75 : 0;
      context.globalAlpha = dim ? 0.16 : 1;
      context.fillStyle = fill;
      context.fillRect(left, y, right - left - gap, height);
      if (events.recompute[i]) {
        context.fillStyle = options.byStage ? palette.idle : palette.recompute;
        context.globalAlpha *= options.byStage ? 0.55 : 1;
        context.fillRect(left, y, x(events.start[i] + events.recompute[i]) - left, height);
        context.globalAlpha = dim ? 0.16 : 1;
      } else if (options.byStage && events.kind[i] === GP.model.BACKWARD) {
        context.fillStyle = palette.idle;
        context.globalAlpha *= 0.35;
        context.fillRect(left, y + height * 0.62, right - left - gap, height * 0.38);
        context.globalAlpha = dim ? 0.16 : 1;
      }
      if (followed) {
        context.strokeStyle = palette.follow;
        context.lineWidth = 2;
        context.strokeRect(left + 0.5, y, Math.max(1, right - left - 1), height);
      }
      label(context, data, events, i, rank, left, right, y + height / 2, ink);
    }
    context.globalAlpha = 1;
  }

  function label(context, data, events, i, rank, left, right, middle, ink) {
    const width = right - left;
    if (width < 15) return;
    let text = NAMES[events.kind[i]];
    if (events.stage[i] >= 0) {
      const number = String(events.microBatch[i]);
      text = data.stages_of_device[rank].length > 1 ? `${events.stage[i]}·${number}` : number;
      if (width > 74) text = `${events.kind[i] === GP.model.FORWARD ? "F" : "B"} ${text}`;
    }
    if (context.measureText(text).width > width - 5) return;
    context.fillStyle = ink;
    context.textAlign = "center";
    context.fillText(text, (left + right) / 2, middle + 0.5);
  }

  function messages(context, data, chart, x, state) {
    const { transfers } = chart.timeline;
    const [from, to] = x.domain();
    const half = STRIP / 2;
    for (const [lists, fill, offset] of [[transfers.sent, palette.sent, 0], [transfers.received, palette.received, half]]) {
      context.fillStyle = fill;
      lists.forEach((list, rank) => {
        const y = AXIS + (rank + 1) * chart.row - STRIP - 1 + offset;
        let painted = -1;
        for (const i of list) {
          if (transfers.end[i] < from) continue;
          if (transfers.start[i] > to) break;
          const left = x(transfers.start[i]), right = Math.max(left + 1, x(transfers.end[i]));
          if (right - left <= 1.5 && Math.round(right) === painted) continue;
          painted = Math.round(right);
          const edge = data.edges[transfers.edge[i]];
          const other = state.stage !== null && edge.source !== state.stage && edge.target !== state.stage;
          const dim = state.samples ? !overlaps(state.samples, samplesOfTransfer(transfers, i)) : other;
          context.globalAlpha = dim ? 0.16 : 1;
          context.fillRect(left, y, right - left, half - 0.5);
        }
      });
    }
    context.globalAlpha = 1;
  }

  function samplesOfTransfer(transfers, i) {
    return [transfers.firstSample[i], transfers.firstSample[i] + transfers.samples[i]];
  }

  // Lines from the device that sends a followed sample to the one that receives it.
  function path(context, data, chart, x, samples) {
    const { transfers } = chart.timeline;
    context.strokeStyle = palette.follow;
    context.lineWidth = 1.5;
    context.globalAlpha = 0.85;
    context.beginPath();
    for (let i = 0; i < transfers.count; i += 1) {
      if (!overlaps(samples, samplesOfTransfer(transfers, i))) continue;
      const [y0, y1] = [transfers.source[i], transfers.target[i]].map((rank) => AXIS + (rank + 0.42) * chart.row);
      context.moveTo(x(transfers.start[i]), y0);
      context.lineTo(x(transfers.end[i]), y1);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  function describe(data, timeline, found) {
    const { time, bytes, count } = GP.format;
    if (found.transfer !== undefined) {
      const t = timeline.transfers, i = found.transfer, edge = data.edges[t.edge[i]];
      const ends = t.kind[i] === GP.model.FORWARD ? [edge.source, edge.target] : [edge.target, edge.source];
      return { title: `${t.kind[i] === GP.model.FORWARD ? "Activation" : "Gradient"}: ${ends.map((s) => data.stages[s].name).join(" → ")}`,
        lines: [`device ${t.source[i]} → device ${t.target[i]}, ${bytes(t.bytes[i])}`,
          `samples ${t.firstSample[i]} to ${t.firstSample[i] + t.samples[i] - 1}`,
          `${time(t.start[i])} to ${time(t.end[i])} (${time(t.end[i] - t.start[i])})`] };
    }
    if (found.event !== undefined) return describeEvent(data, timeline.events, found.event, found.rank);
    if (!found.gutter) return { title: "", lines: [] };
    const use = timeline.uses[found.rank];
    return { title: `Device ${found.rank}: ${data.devices[found.rank].kind}, node ${data.devices[found.rank].node}`,
      lines: [`${count(use.stages.length, "stage")}: ${use.stages.map((s) => `${s} ${data.stages[s].name}`).join(", ") || "none"}`,
        `busy ${time(use.busy_ns)} of ${time(timeline.iteration_ns)}`,
        `idle: ${time(use.fill_ns)} before, ${time(use.wait_ns)} between, ${time(use.drain_ns)} after its tasks`] };
  }

  function describeEvent(data, events, i, rank) {
    const { time } = GP.format;
    const span = `${time(events.start[i])} to ${time(events.end[i])} (${time(events.end[i] - events.start[i])})`;
    if (events.stage[i] < 0) return { title: `${NAMES[events.kind[i]]} on device ${rank}`, lines: [span] };
    const [first, last] = GP.model.samplesOf(data, events.stage[i], events.microBatch[i], rank);
    const lines = [`micro-batch ${events.microBatch[i]}, samples ${first} to ${last - 1}`, `device ${rank}`, span];
    if (events.recompute[i]) lines.push(`of which recompute ${time(events.recompute[i])}`);
    return { title: `${NAMES[events.kind[i]]} of stage ${events.stage[i]}: ${data.stages[events.stage[i]].name}`, lines };
  }

  return { GUTTER, AXIS, STRIP, chart, describe, refresh, overlaps };
})();
