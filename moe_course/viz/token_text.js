// The text of a run, every token marked with the ranks its routes went to. Data: schema moe_course.flow/1.

function mount(root, data, opts = {}) {
  const layers = [...new Set(data.passes.map((pass) => pass.layer))];
  const state = { layer: null, step: null, token: null }; // `token` is its place in the pass of `step`
  let chips = []; // of this layer: {button, token, step}
  const picker = h("select", { "aria-label": "Layer", onchange: () => tell({ layer: Number(picker.value) }) }, layers.map((number) => h("option", { value: number }, `layer ${number}`)));
  const legend = h("span", { class: "mc-bar" }, Array.from({ length: data.ranks }, (_, rank) => h("span", { class: "tt-legend" }, h("i", { style: `background:${rankColour(rank)}` }), `rank ${rank}`)));
  const detail = h("p", { class: "tt-detail", "aria-live": "polite" });
  const texts = h("div", { class: "tt-texts" });
  root.classList.add("moe-course", "token-text");
  root.replaceChildren(h("div", { class: "mc-bar" }, h("label", {}, "where its routes went in ", picker), legend), texts, detail);

  const inShort = (token) => describeToken(data, token, shortened(token.text));

  function chip(token) {
    const bar = h("span", { class: "tt-bar", "aria-hidden": "true" }, token.shares.map((share, rank) => (share > 0 ? h("i", { style: `flex:${share};background:${rankColour(rank)}` }) : null)));
    const [, letters, part] = /^(.*?)([₁-₄]?)$/su.exec(shortened(token.text)); // the number of a byte stands behind letters of any script
    const digit = h("small", {}, h("span", { class: "mc-hidden" }, token.routes.length ? " rank " : " no rank "), token.routes.length ? String(mainRank(token.shares)) : "·");
    const button = h("button", { type: "button", class: token.made ? "tt-token tt-made" : "tt-token", tabindex: -1, title: describeToken(data, token) }, h("code", {}, h("bdi", {}, letters), part), bar, digit);
    const step = data.passes[token.pass].step;
    button.addEventListener("click", () => tell(button.getAttribute("aria-pressed") === "true" ? { token: null } : { layer: state.layer, step, token: token.indices[0] }));
    button.addEventListener("focus", () => say(detail, inShort(token)));
    return { button, token, step };
  }

  // The chip of the state is pressed and told of.
  function press() {
    const chosen = chips.find(({ step, token }) => step === state.step && token.indices.includes(state.token));
    if (!chosen) state.step = state.token = null;
    for (const one of chips) one.button.setAttribute("aria-pressed", String(one === chosen));
    say(detail, chosen ? inShort(chosen.token) : "Choose a token to read which experts it went to.");
  }

  // What is not there is refused: another layer, or a token that the pass has not.
  function set(wanted) {
    if (layers.includes(wanted.layer) && wanted.layer !== state.layer) show(wanted.layer);
    const { step, token } = { ...state, ...wanted };
    if (token === null || chips.some((one) => one.step === step && one.token.indices.includes(token))) Object.assign(state, { step, token });
    press();
  }

  function tell(wanted) {
    set(wanted);
    opts.onState?.({ ...state });
    root.dispatchEvent(new CustomEvent("moe-state", { detail: wanted, bubbles: true })); // for a page with several pictures
  }

  function show(number) {
    state.layer = number;
    picker.value = String(number);
    root.dataset.layer = String(number);
    const lines = tokenShares(data, number).map((tokens, prompt) => tokens.map((token) => chip({ ...token, made: token.position >= data.prompts[prompt].length })));
    chips = lines.flat();
    texts.replaceChildren(
      ...lines.map((line, prompt) => {
        const buttons = line.map((one) => one.button);
        if (buttons.length) buttons[0].tabIndex = 0;
        const bar = h("div", { class: "tt-line", role: "toolbar", "aria-label": `tokens of prompt ${prompt}` }, buttons);
        bar.addEventListener("keydown", (event) => walk(event, buttons));
        return h("section", {}, h("h3", {}, `prompt ${prompt}, on rank ${data.prompts[prompt].rank}`), bar);
      }),
    );
  }

  // arrows go from token to token, as in a toolbar: one stop of the Tab key for each prompt
  function walk(event, buttons) {
    const at = buttons.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined || !buttons[to]) return;
    event.preventDefault();
    event.stopPropagation();
    buttons[at].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  }

  set({ layer: layers[0] });
  set(opts.state ?? {});
  return {
    set,
    get: () => ({ ...state }),
    destroy: () => root.replaceChildren(),
  };
}

export { mount, tokenShares, mainRank, describeToken };
export default adapter(mount);
