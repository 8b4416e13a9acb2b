// Part of score_grid.js: the router's rules, and how numbers and tiles are laid out. No page is needed here.

const CIVIDIS = ["#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78",
  "#8c8878", "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"];
const HEAT = CIVIDIS.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));

// Colour of x in 0..1, as [red, green, blue].
function cividis(x) {
  const place = Math.min(Math.max(x, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(place), CIVIDIS.length - 2);
  return HEAT[low].map((from, channel) => Math.round(from + (HEAT[low + 1][channel] - from) * (place - low)));
}

// Indices of the k largest, descending, ties to the lowest index: JavaScript's sort is stable.
const best = (values, k) => values.map((_, i) => i).sort((a, b) => values[b] - values[a]).slice(0, k);

// `grouped_topk` of the router for one token, in fp32: scores [E], bias [E] or null -> ids [K], weights [K], kept groups.
function chooseExperts(scores, bias, options) {
  const choice = scores.map((score, expert) => (bias ? Math.fround(score + bias[expert]) : score));
  const size = scores.length / options.n_group;
  const groups = Array.from({ length: options.n_group }, (_, group) => group);
  const groupScore = (group) => {
    const [first, second] = choice.slice(group * size, (group + 1) * size).sort((a, b) => b - a);
    return bias ? Math.fround(first + second) : first; // with a bias a group counts by its best two, else by its best
  };
  const kept = options.n_group > 1 ? best(groups.map(groupScore), options.topk_group) : groups;
  const open = new Set(kept);
  const ids = best(choice.map((value, expert) => (open.has(Math.floor(expert / size)) ? value : -Infinity)), options.top_k);
  let weights = ids.map((expert) => scores[expert]); // the bias chooses and never weighs
  if (options.norm_topk_prob) {
    const sum = weights.reduce((total, weight) => total + weight, 0) + 1e-20;
    weights = weights.map((weight) => weight / sum);
  }
  return { ids, weights: weights.map((weight) => weight * options.routed_scaling_factor), choice, kept };
}

// The bias of the model with `extra` added to one expert; null while there is neither.
function addBias(bias, experts, expert, extra) {
  if (!bias && !extra) return null;
  return Array.from({ length: experts }, (_, e) => Math.fround((bias ? Math.fround(bias[e]) : 0) + (e === expert ? Math.fround(extra) : 0)));
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);
const shown = (value) => (Math.abs(value) < 0.1 && value !== 0 ? value.toPrecision(3) : value.toFixed(3));
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(Math.abs(value) < 0.1 && value !== 0 ? 4 : 2);
const fitted = (text, characters) => (text.length > characters ? text.slice(0, characters - 1) + "…" : text);

// How many experts stand in a line, and how large a tile is. Lines are of one length and end between groups where they can.
function tiling(width, experts, groupSize) {
  const fits = Math.max(8, Math.floor(width / 14));
  const unit = groupSize < experts && groupSize <= fits ? groupSize : 8;
  const lines = fits >= experts ? 1 : Math.ceil(experts / (Math.floor(fits / unit) * unit));
  const inLine = Math.min(experts, Math.ceil(experts / lines / unit) * unit);
  const tile = Math.min(60, width / inLine);
  return { inLine, lines: Math.ceil(experts / inLine), tile, height: Math.max(15, Math.min(26, tile)) };
}
