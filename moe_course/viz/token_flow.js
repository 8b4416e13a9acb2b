// The player: every token of a pass on its way to its experts and home. Data: schema moe_course.flow/1.

function mount(root, data, opts = {}) {
  const steps = [...new Set(data.passes.map((pass) => pass.step))];
  const layers = [...new Set(data.passes.map((pass) => pass.layer))].sort((a, b) => a - b);
  const state = { step: steps[0], layer: layers[0], token: null, rank: null, expert: null };
  let [t, playing, frame, last, model, scene, chosen, spoken] = [0, false, 0, 0, null, null, [], ""];
  let [frames, since] = [0, 0];

  const button = (text, f, more) => h("button", { type: "button", onclick: f, ...more }, text);
  const pick = (label, f) => h("select", { "aria-label": label, onchange: (event) => f(event.target.value) });
  const play = button("▶ Play", toggle, { class: "mc-play" });
  const scrub = h("input", { type: "range", min: 0, max: END, step: 0.01, value: 0, "aria-label": "Time in this layer", oninput: () => { pause(); show(Number(scrub.value)); }, onchange: tell });
  const speed = pick("Speed", () => {});
  const on = h("input", { type: "checkbox" });
  const [step, layer, rank, expert, token] = [
    pick("Step", (value) => set({ step: Number(value), token: null })), pick("Layer", (value) => set({ layer: Number(value) })),
    pick("Only rank", (value) => set({ rank: value === "" ? null : Number(value) })),
    pick("Only expert", (value) => set({ expert: value === "" ? null : Number(value) })),
    pick("Token", (value) => set({ token: value === "" ? null : Number(value) }))];
  const asTable = button("as table", () => { asTable.setAttribute("aria-pressed", String(table.hidden)); swap(); }, { "aria-pressed": "false" });
  const chips = PHASES.map((name, i) => button(name, () => { pause(); show(STOPS[i]); tell(); }, { class: "mc-phase" }));
  const below = h("canvas", { "aria-hidden": "true" });
  const above = h("canvas", { role: "img", onclick: choose, onpointermove: hover });
  const stage = h("div", { class: "mc-stage", tabindex: 0, role: "group", "aria-label": "Player. Space plays and pauses, left and right step through the phases, up and down choose a token, Escape lets it go." }, below, above);
  const table = h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Routes as a table", hidden: true });
  const counts = [h("span"), h("span")];
  const details = h("div", { class: "mc-details" });
  const live = h("p", { class: "mc-quiet", "aria-live": "polite" });
  const scale = h("span", { class: "mc-scale", style: `background:linear-gradient(90deg,${CIVIDIS.join(",")})`, "aria-hidden": "true" });
  const most = h("span");
  const legend = h("div", { class: "mc-legend mc-quiet" }, h("span", {}, "colour: the rank a row comes from"), h("span", {}, "● travels"), h("span", {}, "■ stays on its rank"),
    data.shape === "allgather_reducescatter" ? h("span", {}, "○ travels, but no expert there needs it") : null, data.capacity ? h("span", {}, "▨ empty places of the padded buffer") : null,
    h("span", {}, "expert: 1 route", scale, most), h("span", { class: "mc-dots" }));
  root.classList.add("moe-course", "mc-token-flow");
  root.setAttribute("data-lm-suppress-shortcuts", "true"); // JupyterLab's own keys rest while ours are in use
  root.addEventListener("keydown", key);
  const box = h("div", {},
    h("div", { class: "mc-bar" }, play, scrub, h("label", {}, "speed", speed), h("label", {}, on, "all steps"), asTable),
    h("div", { class: "mc-bar mc-phases", role: "group", "aria-label": "Phase" }, chips),
    h("div", { class: "mc-bar" }, h("label", {}, "step", step), h("label", {}, "layer", layer), h("label", {}, "token", token), h("label", {}, "only rank", rank), h("label", {}, "only expert", expert)),
    h("p", { class: "mc-quiet mc-travel" }, h("b", {}, data.backend), `: ${TRAVEL[data.shape]}${data.transport === "threads" ? "" : ` (over ${data.transport})`}.`),
    stage, table, h("p", { class: "mc-counts", "aria-hidden": "true" }, counts), legend, live, details);
  root.append(box);
  options(speed, [["0.5", "0.5×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]], "1");
  options(step, steps.map((value) => { const pass = passOf(value, layers[0]) ?? data.passes.find((one) => one.step === value); return [value, `${value}: ${pass.phase}, ${counted(distinctTokens(pass.tokens), "token")}`]; }));
  options(layer, layers.map((value) => [value, value]));
  options(rank, [["", "all"], ...Array.from({ length: data.ranks }, (_, r) => [r, `rank ${r}`])]);

  function options(select, pairs, value) {
    select.replaceChildren(...pairs.map(([name, text]) => h("option", { value: name }, String(text))));
    if (value !== undefined) select.value = value;
  }

  function passOf(wantedStep, wantedLayer) {
    return data.passes.find((pass) => pass.step === wantedStep && pass.layer === wantedLayer);
  }

  const visible = (i) => (state.rank === null || model.source[i] === state.rank || model.owner[i] === state.rank) && (state.expert === null || model.expert[i] === state.expert);

  // A pass begins: its routes, and what can be chosen in it.
  function read() {
    const pass = passOf(state.step, state.layer) ?? data.passes.find((one) => one.step === state.step) ?? data.passes[0];
    [state.step, state.layer] = [pass.step, pass.layer];
    model = readPass(data, pass);
    if (state.token !== null && !(state.token in model.tokens)) state.token = null;
    if (state.expert !== null && !model.expertLoad[state.expert]) state.expert = null;
    const used = [...model.expertLoad.keys()].filter((e) => model.expertLoad[e] > 0);
    options(expert, [["", "all"], ...used.map((e) => [e, `${e} · rank ${data.owner[e]} · ${counted(model.expertLoad[e], "route")}`])]);
    options(token, [["", "none"], ...model.tokens.map((one, i) => [i, `${one.text} · rank ${one.rank}, row ${one.row}`])]);
    most.textContent = `${model.mostOfExpert} routes`;
  }

  // Everything that does not change while it plays.
  function build() {
    const width = Math.min(1084, Math.max(420, stage.clientWidth || root.clientWidth - 16));
    if (!root.clientWidth) return;
    const colours = theme(root);
    const g = layout(data, model, width);
    chosen = state.token === null ? [] : sameToken(model.tokens, state.token);
    const chosenMark = new Uint8Array(model.tokens.length);
    for (const i of chosen) chosenMark[i] = 1;
    const shownLoad = new Int32Array(data.ranks);
    const shownOfExpert = new Int32Array(data.experts);
    for (let i = 0; i < model.n; i++) if (visible(i)) { shownLoad[model.owner[i]] += 1; shownOfExpert[model.expert[i]] += 1; }
    const routes = chosen.flatMap((i) => model.routesOf[i]).filter(visible);
    const groups = groupsOf(data, model, g, visible);
    const texts = new Map();
    const inkNames = (colour) => (inkOn(colour) === "#ffffff" ? 1 : 0);
    let done = null;
    scene = {
      data, model, g, colours, chosen, chosenMark, shownLoad, visible, rank: state.rank, expert: state.expert,
      groups, counting: [groups.filter((part) => part.begin >= 1 && part.end <= 1.72), groups.filter((part) => part.begin >= 3.28)],
      into: new Int32Array(data.ranks), share: new Float32Array(data.ranks), all: new Float32Array(data.ranks), arrived: [0, 0], lit: litSheet(model, g, shownOfExpert), done: () => (done ??= doneSheet(model, g, visible, chosenMark, chosen.length > 0)), paths: pathsOf(data, model, g, routes), labels: labelsOf(model, g, routes),
      glyphs: model.tokens.length <= 400 ? glyphSheet(model.tokens) : null, dots: { small: dotSheet(data.ranks, DOT, colours), large: dotSheet(data.ranks, GLYPH, colours) },
      inks: Array.from({ length: data.ranks }, (_, r) => inkNames(rankColour(r))), plainInk: inkNames(colours.background),
      there: wireTotals(data, model.pass.wire.dispatch, data.row_bytes), home: wireTotals(data, model.pass.wire.combine, data.partial_bytes),
      plainFont: "12px ui-sans-serif, system-ui, sans-serif", boldFont: "bold 12px ui-sans-serif, system-ui, sans-serif",
      loadTexts: Array.from(model.load, (n, r) => `${shownLoad[r] === n ? "" : `${whole(shownLoad[r])} of `}${whole(n)}${r === model.busiest ? " ◀ busiest" : ""}`),
      countText: (n) => { if (!texts.has(n)) texts.set(n, counted(n, "row") + " in"); return texts.get(n); },
    };
    stage.style.height = `${g.height}px`;
    drawStill(crisp(below, g.width, g.height), scene);
    crisp(above, g.width, g.height);
    const stride = Math.max(...scene.groups.map((part) => part.stride));
    legend.querySelector(".mc-dots").textContent = stride > 1 ? `one dot stands for up to ${stride} rows; all are counted` : "";
    fillDetails();
    if (!table.hidden) fillTable();
    show(t);
  }

  function show(time) {
    t = Math.min(END, Math.max(0, time));
    const phase = phaseAt(t);
    if (scene) {
      const context = above.getContext("2d");
      context.clearRect(0, 0, scene.g.width, scene.g.height);
      countArrivals(scene, t);
      drawMoving(context, scene, t);
      counts[0].textContent = legText("dispatch", scene.there, scene.arrived[0]);
      counts[1].textContent = legText("combine", scene.home, scene.arrived[1]);
    }
    scrub.value = t.toFixed(2);
    if (root.dataset.phase !== phase || spoken !== summary(phase)) {
      root.dataset.phase = phase;
      scrub.setAttribute("aria-valuetext", phase);
      chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(PHASES[i] === phase)));
      spoken = summary(phase);
      above.setAttribute("aria-label", spoken);
      if (!playing) say(live, spoken);
      if (playing) tell();
    }
    for (const [name, value] of [["step", state.step], ["layer", state.layer], ["token", state.token ?? ""], ["playing", playing]]) {
      if (root.dataset[name] !== String(value)) root.dataset[name] = value;
    }
  }

  function summary(phase) {
    if (!model) return phase;
    const { there, home } = scene ?? { there: { rows: 0 }, home: { rows: 0 } };
    const travel = phase === "dispatch" ? `, ${counted(there.rows, "row")} between ranks` : phase === "combine" ? `, ${counted(home.rows, "row")} between ranks` : "";
    const busiest = `busiest rank ${model.busiest} with ${counted(model.load[model.busiest], "route")}`;
    return `Step ${state.step}, layer ${state.layer}, ${phase}: ${counted(distinctTokens(model.tokens), "token")}, ${counted(model.n, "route")}${travel}; ${busiest}.`;
  }

  function fillDetails() {
    if (!chosen.length) {
      details.replaceChildren(h("p", { class: "mc-quiet" }, "Choose a token, by a click on it or from the list, to see where its contributions come from."));
      return;
    }
    const routes = chosen.flatMap((i) => model.routesOf[i]).filter(visible).sort((a, b) => model.k[a] - model.k[b]);
    details.replaceChildren(
      h("p", {}, h("b", {}, `Token ${named(model.tokens[state.token])}`), ` → ${sharesOf(model, routes)}`),
      h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Contributions of the chosen token" }, routeTable(data, model, routes, false)));
  }

  function fillTable() {
    const all = chosen.length ? chosen.flatMap((i) => model.routesOf[i]) : [...Array(model.n).keys()];
    const routes = all.filter(visible);
    const cut = routes.length > 600 ? h("p", { class: "mc-quiet" }, `The first 600 of ${whole(routes.length)} routes. Choose a token, a rank or an expert to see others.`) : null;
    table.replaceChildren(...[cut, routeTable(data, model, routes.slice(0, 600), true)].filter(Boolean));
  }

  function swap() {
    table.hidden = !table.hidden;
    stage.hidden = legend.hidden = !table.hidden;
    if (table.hidden) build();
    else fillTable();
  }

  function set(wanted) {
    const before = `${state.step}/${state.layer}`;
    const number = (value) => (value === null || value === undefined ? null : Number(value));
    for (const name of ["step", "layer", "token", "rank", "expert"]) if (name in wanted) state[name] = number(wanted[name]);
    if (!model || before !== `${state.step}/${state.layer}`) read();
    if (state.token !== null && !(state.token in model.tokens)) state.token = null;
    for (const [select, value] of [[step, state.step], [layer, state.layer], [rank, state.rank], [expert, state.expert], [token, state.token]]) select.value = value ?? "";
    if ("phase" in wanted && wanted.phase !== phaseAt(t)) t = STOPS[Math.max(0, PHASES.indexOf(wanted.phase))];
    scene = null;
    build();
    show(t);
    tell();
  }

  function tell() {
    opts.onState?.({ ...state, phase: phaseAt(t) });
  }

  function run(now) {
    if (!playing) return;
    frames += 1;
    if (now - since >= 500) {
      root.dataset.fps = ((frames * 1000) / (now - since)).toFixed(1);
      [frames, since] = [0, now];
    }
    const passed = Math.min(0.1, (now - last) / 1000);
    last = now;
    show(t + passed * 0.55 * Number(speed.value));
    if (t >= END && !(on.checked && nextStep())) return pause();
    frame = requestAnimationFrame(run);
  }

  function nextStep() {
    const next = steps[steps.indexOf(state.step) + 1];
    if (next === undefined) return false;
    t = 0;
    set({ step: next, token: null });
    return true;
  }

  function toggle() {
    if (playing) return pause();
    if (!table.hidden) { asTable.setAttribute("aria-pressed", "false"); swap(); }
    if (reducedMotion()) return stepTo(t >= END ? -PHASES.length : 1); // no motion: one phase for each press
    if (t >= END) t = 0;
    playing = true;
    [play.textContent, last, since, frames] = ["❚❚ Pause", performance.now(), performance.now(), 0];
    show(t);
    frame = requestAnimationFrame(run);
  }

  function pause() {
    if (!playing) return;
    playing = false;
    cancelAnimationFrame(frame);
    play.textContent = "▶ Play";
    show(t);
    say(live, spoken);
    tell();
  }

  function stepTo(by) {
    pause();
    const at = PHASES.indexOf(phaseAt(t));
    show(STOPS[Math.min(PHASES.length - 1, Math.max(0, at + by))]);
    tell();
  }

  function key(event) {
    if (["SELECT", "INPUT"].includes(event.target.tagName)) return event.stopPropagation();
    if (event.target.tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return event.stopPropagation();
    const order = model.tokens.length;
    const move = (by) => set({ token: state.token === null ? 0 : (state.token + by + order) % order });
    const keys = { " ": toggle, ArrowRight: () => stepTo(1), ArrowLeft: () => stepTo(-1), Home: () => stepTo(-9), End: () => stepTo(9),
      ArrowDown: () => move(1), ArrowUp: () => move(-1), Escape: () => set({ token: null }) };
    if (!(event.key in keys) || (event.target.classList.contains("mc-scroll") && event.key !== " ")) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  function tokenAt(event) {
    const { left, top } = above.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const { w, h: high } = scene.g.tokenTile;
    return scene.g.tokens.findIndex((place) => x >= place.x && x <= place.x + w + 1 && y >= place.y && y <= place.y + high + 1);
  }

  function choose(event) {
    const found = tokenAt(event);
    set({ token: found < 0 || found === state.token ? null : found });
  }

  function hover(event) {
    const found = tokenAt(event);
    above.style.cursor = found < 0 ? "default" : "pointer";
    above.title = found < 0 ? "" : named(model.tokens[found]);
  }

  let known = 0;
  const sized = new ResizeObserver(() => {
    if (root.clientWidth === known) return;
    known = root.clientWidth;
    scene = null;
    build();
  });
  const stopTheme = onTheme(root, () => build());
  set(opts.state ?? {});
  known = root.clientWidth;
  sized.observe(root);
  return {
    set(wanted) {
      const now = this.get(); // an echo of our own change is no news
      if (Object.keys(wanted).every((name) => !(name in now) || now[name] === wanted[name])) return;
      pause();
      set(wanted);
    },
    get: () => ({ ...state, phase: phaseAt(t) }),
    destroy() {
      pause();
      sized.disconnect();
      stopTheme();
      root.removeEventListener("keydown", key);
      box.remove();
    },
  };
}

export { mount };
export default adapter(mount);
