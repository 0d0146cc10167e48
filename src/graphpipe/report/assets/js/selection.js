// What the reader has picked, and small helpers that every panel uses.
"use strict";

GP.selection = (() => {
  const listeners = [];
  const state = { stage: null, samples: null };
  function change(part) {
    Object.assign(state, part);
    for (const listener of listeners) listener(state);
  }
  return {
    state,
    listen: (listener) => listeners.push(listener),
    pickStage: (stage) => change({ stage: state.stage === stage ? null : stage }),
    follow: (samples) => change({ samples }),
    clear: () => change({ stage: null, samples: null }),
  };
})();

GP.dom = (() => {
  // Elements are made with text only: a name from the model can never become markup.
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value;
      else if (key.startsWith("--")) node.style.setProperty(key, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Neighbouring stages get hues far apart: steps of the golden angle.
  const stageHue = (id) => (id * 137.508 + 205) % 360;
  const stageColour = (id) => `hsl(${stageHue(id)} 52% ${document.documentElement.dataset.theme === "dark" ? 66 : 42}%)`;

  const tip = () => byId("tooltip");
  function showTip(event, title, lines) {
    const box = tip();
    box.replaceChildren(make("b", {}, title), ...lines.map((line) => make("div", {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const y = event.clientY + 16 + height > window.innerHeight ? event.clientY - height - 12 : event.clientY + 16;
    box.style.left = `${Math.max(4, x)}px`;
    box.style.top = `${Math.max(4, y)}px`;
  }
  function hideTip() { tip().hidden = true; }
  return { make, byId, colour, stageColour, showTip, hideTip };
})();
