// Part of rank_timeline.js: sums and words over the spans of a run. No page is needed here.

const milliseconds = (ns) => (ns >= 1e6 ? `${(ns / 1e6).toFixed(1)} ms` : `${(ns / 1e6).toFixed(3)} ms`);
const largest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

const INDEX = new WeakMap(); // data -> step -> indices, looked up at every move

// Indices of the spans of one step, or of all for null; in the order of rank and time.
function spansOf(data, step) {
  if (!INDEX.has(data)) {
    const found = new Map([[null, data.spans.rank.map((_, i) => i)], ...data.passes.map((pass) => [pass.step, []])]);
    data.spans.step.forEach((of, i) => found.get(of).push(i));
    INDEX.set(data, found);
  }
  return INDEX.get(data).get(step) ?? [];
}

// From when to when, in ns, something happens in these spans.
function extent(data, indices) {
  let [from, to] = [Infinity, -Infinity];
  for (const i of indices) {
    from = Math.min(from, data.spans.begin[i]);
    to = Math.max(to, data.spans.begin[i] + data.spans.time[i]);
  }
  return [from, to];
}

// Per rank, in ns: each of the stages without waiting, then the waiting.
function totals(data, indices) {
  const { rank, stage, time, wait } = data.spans;
  const found = Array.from({ length: data.ranks }, () => new Array(data.stages.length + 1).fill(0));
  for (const i of indices) {
    found[rank[i]][stage[i]] += time[i] - wait[i];
    found[rank[i]][data.stages.length] += wait[i];
  }
  return found;
}

// How long a pass took, in ns: on the rank where it took longest, so that clocks need not compare.
function passTime(data, pass) {
  const { rank, begin, time } = data.spans;
  const from = new Array(data.ranks).fill(Infinity);
  const times = new Array(data.ranks).fill(0);
  for (const i of spansOf(data, pass.step)) {
    from[rank[i]] = Math.min(from[rank[i]], begin[i]);
    times[rank[i]] = Math.max(times[rank[i]], begin[i] + time[i] - from[rank[i]]);
  }
  return Math.max(...times);
}

const longestPass = (data) => data.passes[largest(data.passes.map((pass) => passTime(data, pass)))];
const passName = (pass) => `step ${pass.step} (${pass.phase})`;

// What there is to see, in words; `step` null speaks of the whole run.
function findings(data, step) {
  const pass = data.passes.find((entry) => entry.step === step) ?? longestPass(data);
  const spent = totals(data, spansOf(data, step));
  const [experts, waits] = [spent.map((row) => row[data.stages.indexOf("experts")]), spent.map((row) => row[data.stages.length])];
  const [worker, waiter] = [largest(experts), largest(waits)];
  let words = `${step === null ? "longest pass: " : ""}${passName(pass)}, ${milliseconds(passTime(data, pass))}`;
  words += `; most time in experts: rank ${worker}, ${milliseconds(experts[worker])}`;
  if (data.comparable && waits[waiter]) words += `; waits longest: rank ${waiter}, ${milliseconds(waits[waiter])}`;
  return words;
}

function describeSpan(data, i) {
  const { rank, step, layer, stage, time, wait } = data.spans;
  const where = layer[i] < 0 ? "outside the sparse layers" : `layer ${layer[i]}`;
  const waited = wait[i] ? `, of it ${milliseconds(wait[i])} before the last rank came` : "";
  return `Rank ${rank[i]}, step ${step[i]}, ${where}: ${data.stages[stage[i]]}, ${milliseconds(time[i])}${waited}.`;
}

// What of a wanted state there is in this run. The rest is refused.
function known(data, wanted) {
  const there = {
    step: (step) => step === null || data.passes.some((pass) => pass.step === step),
    rank: (rank) => Number.isInteger(rank) && rank >= 0 && rank < data.ranks,
    layer: (layer) => layer === null || data.spans.layer.includes(layer),
    stage: (stage) => stage === null || data.stages.includes(stage),
  };
  return Object.fromEntries(Object.entries(wanted).filter(([name, value]) => there[name]?.(value)));
}

// A table of a step, null for all: heads, then per rank the time in ms of each stage, of waiting, and the sum.
function tableOf(data, step) {
  const rows = totals(data, spansOf(data, step)).map((row, rank) => {
    const times = [...row, row.reduce((sum, ns) => sum + ns, 0)];
    return [`rank ${rank}`, ...times.map((ns) => (ns / 1e6).toFixed(3))];
  });
  return { heads: ["ms", ...data.stages, "waiting", "sum"], rows };
}

// The part of [from, to] that is seen after `zoom` halvings around `middle`.
function zoomed([from, to], zoom, middle) {
  const half = (to - from) / 2 ** (zoom + 1);
  const centre = Math.min(Math.max(middle, from + half), to - half);
  return [centre - half, centre + half];
}

// Round marks for an axis of `span` ns with at most `most` of them: the distance between two.
function tickStep(span, most) {
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough);
}
