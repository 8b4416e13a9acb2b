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
  const { play, scrub, speed, on, asTable, chips, below, above, names, sheets, stage, table, counts, details, live, legend, box } = ui;
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

  // A pass begins: its routes, and what can be chosen in it.
  function read(pass) {
    model = readPass(data, pass);
    options(ui.token, [["", "none"], ...model.tokens.map((one, i) => [i, `${isolated(one.text)} · rank ${one.rank}, row ${one.row}`])]);
    ui.most.textContent = counted(model.mostOfExpert, "route");
  }

  // The experts that can be chosen: those with a route of the chosen rank.
  function listExperts() {
    const used = expertsWith(data, model, state.rank);
    if (!used.some(([expert]) => expert === state.expert)) state.expert = null;
    options(ui.expert, [["", "all"], ...used]);
  }

  // Everything that does not change while it plays.
  function build() {
    const width = Math.min(1084, Math.max(420, stage.clientWidth || root.clientWidth - 16));
    if (!root.clientWidth) return;
    chosen = state.token === null ? [] : sameToken(model.tokens, state.token);
    scene = sceneOf(data, model, state, { width, colours: theme(root), chosen, visible: shownBy(model, state) });
    const { g } = scene;
    [sheets.style.width, sheets.style.height] = [`${g.width}px`, `${g.height}px`];
    drawStill(crisp(below, g.width, g.height), scene);
    ui.scale.style.background = `linear-gradient(90deg,${scaleOn(scene.colours.background).join(",")})`;
    crisp(above, g.width, g.height);
    if (!(names.hidden = stage.clientWidth >= g.width)) drawNames(crisp(names, NAME, g.height), scene);
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
      if (scene && root.dataset.phase !== phase) stage.scrollLeft = FAR[PHASES.indexOf(phase)] * (scene.g.width - stage.clientWidth);
      root.dataset.phase = phase;
      scrub.setAttribute("aria-valuetext", phase);
      chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(PHASES[i] === phase)));
      spoken = summary(phase);
      above.setAttribute("aria-label", spoken);
      say(live, spoken);
      if (playing) tell();
      details.classList.toggle("mc-unrouted", t <= 0);
    }
    for (const [name, value] of Object.entries({ ...state, playing, filter: choiceText(state) })) {
      if (root.dataset[name] !== String(value ?? "")) root.dataset[name] = value ?? "";
    }
  }

  function tick(leg, name) {
    if (scene.arrived[leg] === scene.told[leg]) return;
    scene.told[leg] = scene.arrived[leg];
    counts[leg].textContent = legText(name, scene.totals[leg], scene.arrived[leg], scene.everything[leg]);
  }

  function summary(phase) {
    return inWords(model, scene?.everything, state, phase, ui.filter.textContent);
  }

  function fillDetails() {
    const routes = chosen.flatMap((i) => model.routesOf[i]).sort((a, b) => model.k[a] - model.k[b]);
    details.replaceChildren(...chosenDetails(data, model, state.token === null ? null : model.tokens[state.token], routes, state, table.hidden));
  }

  function fillTable() {
    const all = chosen.length ? chosen.flatMap((i) => model.routesOf[i]) : [...Array(model.n).keys()];
    table.replaceChildren(...longTable(data, model, all.filter(shownBy(model, state))));
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
    const after = stateAfter(data, state, wanted);
    Object.assign(state, after.state);
    if (model?.pass !== after.pass) read(after.pass);
    listExperts();
    ui.filter.textContent = shownText(model, state);
    for (const name of ["step", "layer", "rank", "expert", "token"]) ui[name].value = state[name] ?? "";
    if (PHASES.includes(wanted.phase) && wanted.phase !== phaseAt(t)) t = stopsOf(data)[PHASES.indexOf(wanted.phase)];
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
    if (!root.isConnected) return pause();
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
    live.setAttribute("aria-live", "off"); // words follow the picture; they are read out where it stops
    [play.textContent, last, since, frames] = ["❚❚ Pause", performance.now(), performance.now(), 0];
    show(t);
    frame = requestAnimationFrame(run);
  }

  function pause() {
    if (!playing) return;
    playing = false;
    cancelAnimationFrame(frame);
    play.textContent = "▶ Play";
    live.setAttribute("aria-live", "polite");
    live.textContent = "";
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
  const stopMotion = onLessMotion(pause);
  set(Object(opts.state));
  known = root.clientWidth;
  sized.observe(root);
  return {
    set(wanted) {
      const now = this.get(); // an echo of our own change is no news
      if (!wanted || Object.keys(wanted).every((name) => !(name in now) || now[name] === wanted[name])) return;
      pause();
      set(wanted);
    },
    get: () => ({ ...state, phase: phaseAt(t) }),
    destroy() {
      pause();
      sized.disconnect();
      stopTheme();
      stopMotion();
      root.removeEventListener("keydown", key);
      box.remove();
    },
  };
}

export { mount };
export default adapter(mount);
