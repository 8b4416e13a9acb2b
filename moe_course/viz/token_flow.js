// The player: every token of a pass on its way to its experts and home. Data: schema moe_course.flow/1.

function mount(root, data, opts = {}) {
  const steps = [...new Set(data.passes.map((pass) => pass.step))];
  const layers = [...new Set(data.passes.map((pass) => pass.layer))].sort((a, b) => a - b);
  const state = { step: steps[0], layer: layers[0], token: null, rank: null, expert: null };
  let [t, playing, frame, last, model, scene, chosen, spoken] = [BEGIN, false, 0, 0, null, null, [], ""];
  let [frames, since] = [0, 0];

  const ui = controlsOf(data, {
    toggle, choose, hover, swap, tell, set,
    goTo: (time) => { pause(); show(time); },
  });
  const { play, scrub, speed, on, asTable, chips, below, above, stage, table, counts, details, live, legend, box } = ui;
  root.classList.add("moe-course", "mc-token-flow");
  ownKeys(root);
  root.addEventListener("keydown", key);
  root.append(box);
  options(ui.step, steps.map((value) => {
    const pass = passOf(value, layers[0]) ?? data.passes.find((one) => one.step === value);
    return [value, `${value}: ${pass.phase}, ${counted(distinctTokens(pass.tokens), "token")}`];
  }));
  options(ui.layer, layers.map((value) => [value, value]));
  options(ui.rank, [["", "all"], ...Array.from({ length: data.ranks }, (_, r) => [r, `rank ${r}`])]);

  function passOf(wantedStep, wantedLayer) {
    return data.passes.find((pass) => pass.step === wantedStep && pass.layer === wantedLayer);
  }

  const ofRank = (i) => state.rank === null || model.source[i] === state.rank || model.owner[i] === state.rank;
  const visible = (i) => ofRank(i) && (state.expert === null || model.expert[i] === state.expert);

  // A pass begins: its routes, and what can be chosen in it.
  function read() {
    const pass = passOf(state.step, state.layer) ?? data.passes.find((one) => one.step === state.step) ?? data.passes[0];
    [state.step, state.layer] = [pass.step, pass.layer];
    model = readPass(data, pass);
    if (state.token !== null && !(state.token in model.tokens)) state.token = null;
    options(ui.token, [["", "none"], ...model.tokens.map((one, i) => [i, `${one.text} · rank ${one.rank}, row ${one.row}`])]);
    ui.most.textContent = counted(model.mostOfExpert, "route");
  }

  // The experts that can be chosen: those with a route of the chosen rank.
  function listExperts() {
    const load = new Int32Array(data.experts);
    const wanted = state.expert;
    state.expert = null;
    for (let i = 0; i < model.n; i++) if (visible(i)) load[model.expert[i]] += 1;
    state.expert = load[wanted] ? wanted : null;
    const used = [...load.keys()].filter((e) => load[e] > 0);
    options(ui.expert, [["", "all"], ...used.map((e) => [e, `${e} · rank ${data.owner[e]} · ${counted(load[e], "route")}`])]);
  }

  // Everything that does not change while it plays.
  function build() {
    const width = Math.min(1084, Math.max(420, stage.clientWidth || root.clientWidth - 16));
    if (!root.clientWidth) return;
    chosen = state.token === null ? [] : sameToken(model.tokens, state.token);
    scene = sceneOf(data, model, state, { width, colours: theme(root), chosen, visible });
    const { g } = scene;
    stage.style.height = `${g.height}px`;
    drawStill(crisp(below, g.width, g.height), scene);
    ui.scale.style.background = `linear-gradient(90deg,${scaleOn(scene.colours.background).join(",")})`;
    crisp(above, g.width, g.height);
    const stride = Math.max(...scene.groups.map((part) => part.stride));
    ui.dots.textContent = stride > 1 ? `one dot stands for up to ${stride} rows; all are counted` : "";
    fillDetails();
    if (!table.hidden) fillTable();
    spoken = "";
    show(t);
  }

  function show(time) {
    t = Math.min(END, Math.max(BEGIN, time));
    const phase = phaseAt(t);
    if (scene) {
      const context = above.getContext("2d");
      context.clearRect(0, 0, scene.g.width, scene.g.height);
      countArrivals(scene, t);
      drawMoving(context, scene, t);
      tick(0, "dispatch");
      tick(1, "combine");
    }
    scrub.value = placeOf(data, t).toFixed(2);
    if (root.dataset.phase !== phase || spoken === "") {
      root.dataset.phase = phase;
      scrub.setAttribute("aria-valuetext", phase);
      chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(PHASES[i] === phase)));
      spoken = summary(phase);
      above.setAttribute("aria-label", spoken);
      if (!playing) say(live, spoken);
      if (playing) tell();
      details.classList.toggle("mc-unrouted", t <= 0);
    }
    for (const [name, value] of [["step", state.step], ["layer", state.layer], ["token", state.token ?? ""], ["playing", playing]]) {
      if (root.dataset[name] !== String(value)) root.dataset[name] = value;
    }
  }

  function tick(leg, name) {
    if (scene.arrived[leg] === scene.told[leg]) return;
    scene.told[leg] = scene.arrived[leg];
    counts[leg].textContent = legText(name, scene.totals[leg], scene.arrived[leg]);
  }

  function summary(phase) {
    return model ? inWords(model, scene?.totals, state, phase) : phase;
  }

  function fillDetails() {
    const routes = chosen.flatMap((i) => model.routesOf[i]).filter(visible).sort((a, b) => model.k[a] - model.k[b]);
    details.replaceChildren(...chosenDetails(data, model, state.token === null ? null : model.tokens[state.token], routes, table.hidden));
  }

  function fillTable() {
    const all = chosen.length ? chosen.flatMap((i) => model.routesOf[i]) : [...Array(model.n).keys()];
    table.replaceChildren(...longTable(data, model, all.filter(visible)));
  }

  function swap() {
    table.hidden = !table.hidden;
    asTable.setAttribute("aria-pressed", String(!table.hidden));
    stage.hidden = legend.hidden = !table.hidden;
    if (table.hidden) build();
    else fillTable();
    fillDetails();
  }

  function set(wanted) {
    const before = `${state.step}/${state.layer}`;
    const number = (value) => (value === null || value === undefined ? null : Number(value));
    for (const name of ["step", "layer", "token", "rank", "expert"]) if (name in wanted) state[name] = number(wanted[name]);
    if (!model || before !== `${state.step}/${state.layer}`) read();
    if (state.token !== null && !(state.token in model.tokens)) state.token = null;
    listExperts();
    for (const name of ["step", "layer", "rank", "expert", "token"]) ui[name].value = state[name] ?? "";
    if ("phase" in wanted && wanted.phase !== phaseAt(t)) t = stopsOf(data)[Math.max(0, PHASES.indexOf(wanted.phase))];
    scene = null;
    spoken = "";
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
    t = BEGIN;
    set({ step: next, token: null });
    return true;
  }

  function toggle() {
    if (playing) return pause();
    if (!table.hidden) swap();
    if (reducedMotion()) return stepTo(t >= END ? -PHASES.length : 1); // no motion: one phase for each press
    if (t >= END) t = BEGIN;
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
    show(stopsOf(data)[Math.min(PHASES.length - 1, Math.max(0, at + by))]);
    tell();
  }

  function key(event) {
    const order = model.tokens.length;
    const move = (by) => set({ token: state.token === null ? 0 : (state.token + by + order) % order });
    pressed(event, { " ": toggle, ArrowRight: () => stepTo(1), ArrowLeft: () => stepTo(-1), Home: () => stepTo(-9), End: () => stepTo(9),
      ArrowDown: () => move(1), ArrowUp: () => move(-1), Escape: () => set({ token: null }) });
  }

  function choose(event) {
    const found = tokenUnder(above, scene.g, event);
    set({ token: found < 0 || found === state.token ? null : found });
  }

  function hover(event) {
    const found = tokenUnder(above, scene.g, event);
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
