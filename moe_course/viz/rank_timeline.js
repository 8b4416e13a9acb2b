// What each rank did when: a lane of spans per rank, from real time stamps.

function mount(root, data, opts = {}) {
  const spans = data.spans;
  const bounds = { run: extent(data, spansOf(data, null)), passes: data.passes.map((pass) => extent(data, spansOf(data, pass.step))) };
  const state = { step: null, rank: 0, layer: null, stage: null };
  let [selected, zoom, boxes, passBoxes, drawn] = [0, 0, [], [], ""];

  const stepName = (step) => (step === null ? "whole" : String(step));
  const picker = h("select", { onchange: () => change({ step: picker.value === "whole" ? null : Number(picker.value) }) },
    h("option", { value: "whole" }, "whole run"), data.passes.map((pass) => h("option", { value: pass.step }, passName(pass))));
  const button = (label, act, name) => h("button", { type: "button", onclick: act, "aria-label": name }, label);
  const asTable = h("button", { type: "button", "aria-pressed": "false", onclick: toggleTable }, "as table");
  const lanes = h("canvas", { role: "img" });
  const scroll = h("div", { class: "mc-scroll mc-lanes", tabindex: 0, role: "group", onkeydown: key,
    "aria-label": "Lanes of ranks. Left and right choose a span, up and down a rank, page up and down a step, plus and minus zoom, space shows the step alone or the whole run." }, lanes);
  const live = h("p", { "aria-live": "polite" });
  const detail = h("p", { class: "mc-quiet" });
  const note = data.note ? h("p", { class: "mc-quiet" }, `About the clocks: ${isolated(data.note)}.`) : null;
  const swatches = [...data.stages, "waits for the last rank"].map((name) => ({ name, canvas: h("canvas", { "aria-hidden": "true" }) }));
  const legend = h("div", { class: "mc-legend" }, swatches.filter(({ name }) => data.comparable || name in LOOKS).map(({ name, canvas }) => h("span", {}, canvas, name)));
  const table = h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Time per rank and stage as a table", hidden: true });
  const picture = h("div", {}, scroll, detail, legend);
  root.classList.add("moe-course", "mc-timeline");
  ownKeys(root);
  root.append(...[h("div", { class: "mc-bar" }, h("label", {}, "Show", picker), button("◀", () => walk(-1), "Previous step"), button("▶", () => walk(1), "Next step"),
    button("longest pass", () => change({ step: longestPass(data).step })), button("+", () => magnify(1), "Zoom in"), button("−", () => magnify(-1), "Zoom out"), asTable), live, picture, note, table].filter(Boolean));

  // The span that the state names, of several the longest in the experts. What no span has is named no longer.
  function find() {
    const mine = spansOf(data, state.step).filter((i) => spans.rank[i] === state.rank);
    const named = mine.filter((i) => [null, spans.layer[i]].includes(state.layer) && [null, data.stages[spans.stage[i]]].includes(state.stage));
    if (!named.length) state.layer = state.stage = null;
    const open = named.length ? named : mine;
    const experts = open.filter((i) => data.stages[spans.stage[i]] === "experts");
    return experts[largest(experts.map((i) => spans.time[i]))] ?? open[0] ?? 0;
  }

  function change(wanted, tell = true, span = null) {
    if ("step" in wanted && wanted.step !== state.step) zoom = 0;
    Object.assign(state, wanted);
    selected = span ?? find();
    state.rank = spans.rank[selected];
    picker.value = stepName(state.step);
    draw();
    tellStory();
    if (tell) opts.onState?.({ ...state });
  }

  const select = (i) => change({ rank: spans.rank[i], layer: spans.layer[i], stage: data.stages[spans.stage[i]] }, true, i);

  function tellStory() {
    const words = findings(data, state.step);
    say(live, words[0].toUpperCase() + words.slice(1) + ".");
    say(detail, describeSpan(data, selected));
    lanes.setAttribute("aria-label", `Spans of ${data.ranks} ranks over time, ${state.step === null ? "whole run" : `step ${state.step}`}. ${live.textContent}`);
    Object.assign(root.dataset, { step: stepName(state.step), rank: state.rank, layer: spans.layer[selected], phase: data.stages[spans.stage[selected]], span: selected, zoom });
    if (!table.hidden) fillTable();
  }

  function draw() {
    if (!root.clientWidth || !table.hidden) return;
    const [colours, width] = [theme(root), Math.max(scroll.clientWidth, 240)];
    const base = state.step === null ? bounds.run : bounds.passes[data.passes.findIndex((pass) => pass.step === state.step)];
    const shown = zoomed(base, zoom, spans.begin[selected] + spans.time[selected] / 2);
    const at = { left: 62, wide: width - 72, top: 26, row: data.ranks > 10 ? 26 : 34, origin: base[0] };
    const pen = crisp(lanes, width, at.top + data.ranks * at.row + 20);
    pen.textBaseline = "middle";
    passBoxes = drawPasses(pen, data, bounds, at, state.step, colours);
    boxes = drawLanes(pen, { data, indices: spansOf(data, state.step), shown, selected, rank: state.rank }, at, colours);
    if (colours.background === drawn) return; // the legend changes with the theme alone
    drawn = colours.background;
    for (const { name, canvas } of swatches) {
      const ink = crisp(canvas, 26, 20);
      ink.textBaseline = "middle";
      ink.font = tiny(false);
      const inks = { combine: hatch(ink, LOOKS.combine[0], colours.background) };
      drawBar(ink, name in LOOKS ? name : "combine", { x: 0, y: 10, wide: 26, lane: 18 }, name in LOOKS ? 0 : 26, inks, colours);
    }
  }

  function fillTable() {
    const { heads, rows } = tableOf(data, state.step);
    const head = h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)));
    const body = rows.map(([rank, ...times]) => h("tr", {}, h("th", { scope: "row" }, rank), times.map((time) => h("td", {}, time))));
    const shown = state.step === null ? "whole run" : `step ${state.step}`;
    table.replaceChildren(h("table", {}, h("caption", {}, `Time per stage, ${shown}; waiting is not part of dispatch and combine here`), h("thead", {}, head), h("tbody", {}, body)));
  }

  function toggleTable() {
    table.hidden = !table.hidden;
    picture.hidden = !table.hidden;
    asTable.setAttribute("aria-pressed", String(!table.hidden));
    if (table.hidden) draw();
    else fillTable();
  }

  // The next step; from the whole run to the first or the last one.
  function walk(by) {
    const here = data.passes.findIndex((pass) => pass.step === state.step);
    const next = here < 0 ? (by > 0 ? 0 : data.passes.length - 1) : Math.min(Math.max(here + by, 0), data.passes.length - 1);
    change({ step: data.passes[next].step });
  }

  function magnify(by) {
    zoom = Math.min(Math.max(zoom + by, 0), 8);
    change({}, true, selected);
  }

  // The span on another rank that is at work in the middle of the selected one.
  function beside(rank) {
    const time = spans.begin[selected] + spans.time[selected] / 2;
    const twin = spansOf(data, state.step).filter((i) => spans.rank[i] === rank);
    const away = (i) => Math.max(spans.begin[i] - time, time - spans.begin[i] - spans.time[i], 0);
    return twin.reduce((best, i) => (away(i) < away(best) ? i : best), twin[0]);
  }

  function key(event) {
    const mine = spansOf(data, state.step).filter((i) => spans.rank[i] === state.rank);
    const place = mine.indexOf(selected);
    const hop = (to) => select(mine[Math.min(Math.max(to, 0), mine.length - 1)]);
    const other = (rank) => { const i = rank >= 0 && rank < data.ranks ? beside(rank) : undefined; if (i !== undefined) select(i); };
    const moves = {
      ArrowLeft: () => hop(place - 1), ArrowRight: () => hop(place + 1), Home: () => hop(0), End: () => hop(mine.length - 1),
      ArrowUp: () => other(state.rank - 1), ArrowDown: () => other(state.rank + 1),
      PageUp: () => walk(-1), PageDown: () => walk(1), "+": () => magnify(1), "-": () => magnify(-1),
      " ": () => change({ step: state.step === null ? spans.step[selected] : null }, true, selected),
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    moves[event.key]();
  }

  // Span or pass under the pointer.
  function under(event) {
    const frame = lanes.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const inside = (box) => x >= box.x && x <= box.x + Math.max(box.wide, 2);
    if (y < 22) return { pass: passBoxes.find(inside) };
    return { span: boxes.find((box) => inside(box) && Math.abs(y - box.y) < box.lane / 2) };
  }
  lanes.addEventListener("pointermove", (event) => { detail.textContent = describeSpan(data, under(event).span?.i ?? selected); });
  lanes.addEventListener("click", (event) => {
    const { pass, span } = under(event);
    if (pass) change({ step: pass.step });
    if (span) select(span.i);
  });

  const resized = new ResizeObserver(draw);
  resized.observe(root);
  const deaf = onTheme(root, draw);
  change(known(data, opts.state ?? {}), false);
  return {
    set: (wanted) => change(known(data, wanted), false),
    get: () => ({ ...state }),
    destroy() {
      resized.disconnect();
      deaf();
      root.replaceChildren();
    },
  };
}

export { mount, findings, totals, spansOf, zoomed, describeSpan, known, tableOf, LOOKS };
export default adapter(mount);
