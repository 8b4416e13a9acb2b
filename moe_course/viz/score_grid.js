// Router scores as a grid: a row per token, a column per expert. The choice is made here, live, by the router's rules.

function mount(root, data, opts = {}) {
  const scores = data.scores.map((row) => row.map(Math.fround));
  const [T, E] = [scores.length, scores[0].length];
  const size = E / data.n_group;
  const state = { expert: 0, bias: 0, token: 0 };
  let [chosen, before, heard, last] = [[], [], "", 0];

  const decide = (extra) => scores.map((row) => chooseExperts(row, addBias(data.bias, E, state.expert, extra), data));
  const plain = decide(0);
  const all = plain.flatMap((row) => row.choice);
  const low = all.reduce((a, b) => Math.min(a, b));
  const high = all.reduce((a, b) => Math.max(a, b));
  const reach = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(high - low || 1))).find((n) => n >= high - low) || 1;
  const widest = Math.max(...plain.map((row) => total(row.weights)));
  const locked = data.n_group > 1 && size < 2 && !data.bias; // such a group has no two best: the router refuses a bias

  const expert = h("input", { type: "number", min: 0, max: E - 1, step: 1, oninput: () => expert.value !== "" && change({ expert: Number(expert.value) }), onchange: () => { expert.value = state.expert; } });
  const bias = h("input", { type: "range", min: -reach, max: reach, step: reach / 100, disabled: locked, oninput: () => change({ bias: Number(bias.value) }) });
  const amount = h("output");
  const reset = h("button", { type: "button", onclick: () => change({ bias: 0 }) }, "no bias");
  const asTable = h("button", { type: "button", "aria-pressed": "false", onclick: toggleTable }, "as table");
  const cells = h("canvas", { role: "img" });
  const scroll = h("div", { class: "mc-scroll mc-cells", tabindex: 0, role: "group", onkeydown: key,
    "aria-label": "Grid of scores. Left and right choose an expert, up and down a token, plus and minus change the bias, space takes it away and brings it back." }, cells);
  const bars = h("canvas", { role: "img" });
  const heat = h("span", { class: "mc-scale", style: `background: linear-gradient(90deg, ${CIVIDIS.join(",")})` });
  const heated = h("span"); // what the heat shows: without any bias the score alone
  const legend = h("div", { class: "mc-legend" }, h("span", {}, heated, " ", shown(low), heat, shown(high)),
    h("span", {}, `outlined and numbered: the ${data.top_k} chosen, best first`), h("span", {}, "double outline: chosen by your bias"),
    h("span", {}, "dashed: lost by it"), data.n_group > 1 ? h("span", {}, "grey, crossed: group dropped") : null);
  const live = h("p", { "aria-live": "polite" });
  const detail = h("p", { class: "mc-quiet" });
  const table = h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Chosen experts as a table", hidden: true });
  const caption = h("p", {}, `Weights, from the score alone${data.norm_topk_prob ? ", divided by their sum" : ""}, times ${data.routed_scaling_factor}:`);
  const picture = h("div", {}, scroll, detail, legend, caption, bars);
  root.classList.add("moe-course", "mc-score-grid");
  ownKeys(root);
  root.append(h("div", { class: "mc-bar" }, h("label", {}, "Expert", expert), h("label", {}, "bias added", bias), amount, reset, asTable), live, picture, table);

  // What of a wanted state there is in this grid. The rest is refused.
  function known(wanted) {
    const below = (limit) => (value) => Number.isInteger(value) && value >= 0 && value < limit;
    const there = { expert: below(E), token: below(T), bias: Number.isFinite };
    return Object.fromEntries(Object.entries(wanted).filter(([name, value]) => there[name]?.(value)));
  }

  function change(wanted, tell = true) {
    const whole = (value, limit) => Math.min(Math.max(Math.round(Number(value)) || 0, 0), limit - 1);
    if ("expert" in wanted) state.expert = whole(wanted.expert, E);
    if ("token" in wanted) state.token = whole(wanted.token, T);
    if ("bias" in wanted) state.bias = locked ? 0 : Number(wanted.bias) || 0;
    [chosen, before] = [decide(state.bias), state.bias ? plain : null];
    if (document.activeElement !== expert) expert.value = state.expert;
    bias.value = state.bias;
    amount.textContent = signed(state.bias);
    draw();
    tellStory();
    if (tell) opts.onState?.({ ...state });
  }

  function tellStory() {
    const takers = (rows) => rows.filter((row) => row.ids.includes(state.expert)).length;
    heated.textContent = data.bias || state.bias ? "score + bias" : "score";
    const sums = chosen.map((row) => total(row.weights));
    const [least, most] = [Math.min(...sums).toFixed(3), Math.max(...sums).toFixed(3)];
    const without = before ? `; without the added bias by ${takers(before)}` : "";
    const sum = least === most ? `The weights of every token add up to ${least}.` : `The weights of a token add up to ${least} to ${most}.`;
    say(live, `Expert ${state.expert}, bias ${signed(state.bias)}: chosen by ${takers(chosen)} of ${T} tokens${without}. ${sum}`);
    say(detail, describe(state.token, state.expert));
    cells.setAttribute("aria-label", `Choice scores of ${T} tokens and ${E} experts; the ${data.top_k} chosen of each token are outlined.`);
    bars.setAttribute("aria-label", chosen.map((row, t) => `${isolated(shortened(data.tokens[t]))}: experts ${row.ids.join(", ")}`).join("; "));
    Object.assign(root.dataset, { expert: state.expert, bias: state.bias, token: state.token, sum: most, chosen: chosen[state.token].ids.join(" ") });
    if (!table.hidden) fillTable();
  }

  function describe(token, e) {
    const { ids, weights, choice, kept } = chosen[token];
    const place = ids.indexOf(e);
    const added = addBias(data.bias, E, state.expert, state.bias)?.[e] ?? 0;
    const group = data.n_group > 1 && !kept.includes(Math.floor(e / size)) ? ", its group is dropped" : "";
    const fate = place < 0 ? `not chosen${group}` : `chosen as number ${place + 1}, weight ${shown(weights[place])}`;
    return `Token ${token} “${isolated(shortened(data.tokens[token]))}”, expert ${e}: score ${shown(scores[token][e])}, bias ${signed(added)}, choice score ${shown(choice[e])}; ${fate}.`;
  }

  // Where things are: lines of experts below each other, a row per token in each.
  function places() {
    const label = Math.min(92, Math.max(40, 9 + 7.4 * Math.max(...data.tokens.map((text) => Math.min(text.length, 11)))));
    const [grid, head] = [tiling(Math.max(scroll.clientWidth, 240) - label - 4, E, size), data.n_group > 1 ? 32 : 20];
    return { ...grid, label, head, panel: head + T * grid.height + 9, bar: 20 };
  }

  function draw() {
    if (!root.clientWidth || !table.hidden) return;
    const [colours, at, width] = [theme(root), places(), Math.max(scroll.clientWidth, 240)];
    const view = { data, state, chosen, before, low, high };
    const pen = crisp(cells, at.label + at.inLine * at.tile + 4, at.lines * at.panel);
    pen.textBaseline = "middle";
    for (let line = 0; line < at.lines; line++) drawPanel(pen, view, at, line, colours);
    const second = crisp(bars, width, T * at.bar + 4);
    second.textBaseline = "middle";
    drawWeights(second, view, at, width, widest, colours);
  }

  function fillTable() {
    const names = ["token", ...Array.from({ length: data.top_k }, (_, k) => `${k + 1}.`), "Σ"];
    const rows = chosen.map((row, t) => h("tr", {}, h("th", { scope: "row", title: data.tokens[t] }, isolated(shortened(data.tokens[t]))),
      row.ids.map((e, k) => h("td", {}, `${e}: ${shown(row.weights[k])}`)), h("td", {}, total(row.weights).toFixed(3))));
    const head = h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)));
    table.replaceChildren(h("table", {}, h("caption", {}, "Expert: weight, in the order of choice"), h("thead", {}, head), h("tbody", {}, rows)));
  }

  function toggleTable() {
    table.hidden = !table.hidden;
    picture.hidden = !table.hidden;
    asTable.setAttribute("aria-pressed", String(!table.hidden));
    if (table.hidden) draw();
    else fillTable();
  }

  // Token and expert under the pointer, or null.
  function under(event) {
    const box = cells.getBoundingClientRect();
    const at = places();
    const [x, y] = [event.clientX - box.left - at.label, event.clientY - box.top];
    const line = Math.floor(y / at.panel);
    const token = Math.floor((y - line * at.panel - at.head) / at.height);
    const e = line * at.inLine + Math.floor(x / at.tile);
    return x >= 0 && x < at.inLine * at.tile && token >= 0 && token < T && e < E ? { token, expert: e } : null;
  }
  cells.addEventListener("pointermove", (event) => {
    const place = under(event);
    detail.textContent = describe(place?.token ?? state.token, place?.expert ?? state.expert);
  });
  cells.addEventListener("click", (event) => { const place = under(event); if (place) change(place); });

  function key(event) {
    const step = reach / 20;
    const moves = {
      ArrowLeft: () => ({ expert: state.expert - 1 }), ArrowRight: () => ({ expert: state.expert + 1 }),
      ArrowUp: () => ({ token: state.token - 1 }), ArrowDown: () => ({ token: state.token + 1 }),
      Home: () => ({ expert: 0 }), End: () => ({ expert: E - 1 }),
      "+": () => ({ bias: state.bias + step }), "-": () => ({ bias: state.bias - step }),
      " ": () => { const back = state.bias ? 0 : last; last = state.bias || last; return { bias: back }; },
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    change(moves[event.key]());
  }

  const resized = new ResizeObserver(draw);
  resized.observe(root);
  const deaf = onTheme(root, draw);
  change(known(opts.state ?? {}), false);
  return {
    set: (wanted) => change(known(wanted), false),
    get: () => ({ ...state }),
    destroy() {
      resized.disconnect();
      deaf();
      root.replaceChildren();
    },
  };
}

export { mount, chooseExperts, addBias, cividis };
export default adapter(mount);
