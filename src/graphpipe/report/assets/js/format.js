// Times, sizes and counts as people read them; the same rules as graphpipe/report/units.py.
"use strict";
const GP = {};

GP.format = (() => {
  const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

  function fourDigits(number) {
    const digits = Math.max(0, 4 - String(Math.trunc(Math.abs(number))).length);
    const [whole, part = ""] = number.toFixed(digits).split(".");
    const kept = part.replace(/0+$/, "");
    return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (kept ? `.${kept}` : "");
  }

  function scaled(value, units) {
    for (const [factor, unit] of units) {
      if (Math.abs(value) >= factor * 0.99995 || factor === 1) return `${fourDigits(value / factor)} ${unit}`;
    }
    return String(value);
  }

  // [0, 1, 2, 5] as "0–2, 5".
  function ranks(list) {
    const parts = [];
    for (let i = 0; i < list.length; ) {
      let j = i;
      while (j + 1 < list.length && list[j + 1] === list[j] + 1) j += 1;
      parts.push(i === j ? `${list[i]}` : j === i + 1 ? `${list[i]}, ${list[j]}` : `${list[i]}–${list[j]}`);
      i = j + 1;
    }
    return parts.join(", ");
  }

  return {
    time: (ns) => scaled(ns, TIMES),
    bytes: (n) => scaled(n, SIZES),
    percent: (share) => `${(share * 100).toFixed(1)} %`,
    count: (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`,
    number: (n) => n.toLocaleString("en-US", { maximumFractionDigits: 0 }),
    ranks,
  };
})();
