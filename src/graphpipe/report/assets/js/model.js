// The report's data, decoded: columns of typed numbers and an index of each device's events.
"use strict";

GP.model = (() => {
  const FORWARD = 0, BACKWARD = 1;
  const KIND_NAMES = ["forward", "backward", "all-reduce", "optimizer"];

  function running(gaps) {
    const out = new Float64Array(gaps.length);
    let level = 0;
    for (let i = 0; i < gaps.length; i += 1) out[i] = level += gaps[i];
    return out;
  }

  function decodeEvents(columns, worldSize) {
    const rank = running(columns.rank);
    const count = rank.length;
    const start = new Float64Array(count), end = new Float64Array(count);
    for (let i = 0, reached = 0; i < count; i += 1) {
      start[i] = reached + columns.gap[i];
      end[i] = reached = start[i] + columns.length[i];
    }
    const first = new Int32Array(worldSize + 1);
    for (let i = 0; i < count; i += 1) first[rank[i] + 1] += 1;
    for (let r = 0; r < worldSize; r += 1) first[r + 1] += first[r];
    return { count, rank, start, end, first, kind: columns.kind, stage: columns.stage,
             microBatch: columns.micro_batch, recompute: columns.recompute };
  }

  function decodeTransfers(columns, worldSize) {
    const start = running(columns.start);
    const end = start.map((at, i) => at + columns.length[i]);
    const sent = Array.from({ length: worldSize }, () => []);
    const received = Array.from({ length: worldSize }, () => []);
    for (let i = 0; i < start.length; i += 1) {
      sent[columns.source[i]].push(i);
      received[columns.target[i]].push(i);
    }
    return { count: start.length, start, end, sent, received, source: columns.source, target: columns.target,
             kind: columns.kind, edge: columns.edge, bytes: columns.bytes,
             firstSample: columns.first_sample, samples: columns.samples };
  }

  function decodeTimeline(raw, worldSize) {
    return {
      ...raw,
      events: decodeEvents(raw.events, worldSize),
      transfers: decodeTransfers(raw.transfers, worldSize),
      memory: raw.memory.map((steps) => ({ times: running(steps.times), bytes: running(steps.bytes) })),
    };
  }

  function load() {
    const data = JSON.parse(document.getElementById("report-data").textContent);
    data.timelines = data.timelines.map((raw) => decodeTimeline(raw, data.world_size));
    data.maxTime = Math.max(1, ...data.timelines.map((t) => t.iteration_ns));
    data.stages.forEach((stage, id) => { stage.id = id; });
    return data;
  }

  function copyOf(data, stage, rank) {
    return Math.floor(data.stages[stage].devices.indexOf(rank) / data.stages[stage].replicas);
  }

  function copyStart(data, copy) {
    return Math.floor((copy * data.batch_size) / data.copies);
  }

  // Samples [first, last) of the mini-batch that a task covers.
  function samplesOf(data, stage, microBatch, rank) {
    const copy = copyOf(data, stage, rank), size = data.stages[stage].micro_batch;
    const first = copyStart(data, copy) + microBatch * size;
    return [first, Math.min(first + size, copyStart(data, copy + 1))];
  }

  // A stage's predicted [forward, backward] on the first of its devices whose kind is known.
  function timesOf(data, stage) {
    for (const rank of stage.devices) {
      const times = stage.times[data.devices[rank].kind];
      if (times) return times;
    }
    return [0, 0];
  }

  // Nanoseconds that a stage needs for one sample on each of its devices.
  function timePerSample(data, stage) {
    const [forward, backward] = timesOf(data, stage);
    return (forward + backward) / (stage.micro_batch * stage.replicas);
  }

  // Bytes of a stage on one device with its bound of samples in flight.
  function memoryOf(stage) {
    const perReplica = Math.ceil(stage.in_flight / (stage.replicas * stage.micro_batch));
    const saved = stage.has_backward ? perReplica * stage.memory.saved_per_micro_batch : 0;
    return stage.memory.static + saved + stage.memory.workspace + stage.memory.recompute;
  }

  return { FORWARD, BACKWARD, KIND_NAMES, load, samplesOf, copyStart, copyOf, timesOf, timePerSample, memoryOf };
})();
