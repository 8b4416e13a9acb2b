// The text of a run, every token marked with the ranks its routes went to. Data: schema moe_course.flow/1.

// Where the tokens of one layer went: prompt -> [{token, pass, shares: [weight per rank], routes}], by position.
function tokenShares(data, layer) {
  const prompts = data.prompts.map(() => []);
  data.passes.forEach((pass, number) => {
    if (pass.layer !== layer) return;
    const found = pass.tokens.map((token, index) => ({ ...token, pass: number, index, shares: new Array(data.ranks).fill(0), routes: [] }));
    pass.routes.token.forEach((index, route) => {
      const owner = pass.routes.owner[route];
      found[index].shares[owner] += pass.routes.weight[route];
      found[index].routes.push(route);
    });
    for (const token of found) if (prompts[token.prompt]) prompts[token.prompt].push(token);
  });
  for (const tokens of prompts) tokens.sort((a, b) => a.position - b.position);
  return prompts;
}

// The rank that has the largest share; the lowest one of equals.
const mainRank = (shares) => shares.indexOf(Math.max(...shares));

function describeToken(data, token) {
  const routes = data.passes[token.pass].routes;
  const byOwner = new Map();
  for (const route of token.routes) {
    const owner = routes.owner[route];
    if (!byOwner.has(owner)) byOwner.set(owner, []);
    byOwner.get(owner).push(`${routes.expert[route]} (${routes.weight[route].toFixed(2)})`);
  }
  const parts = [...byOwner.keys()].sort((a, b) => a - b).map((owner) => `rank ${owner}: ${byOwner.get(owner).join(", ")}`);
  return `${token.text} at position ${token.position}, from rank ${token.rank}. Experts (weight) on ${parts.join("; ") || "no rank"}`;
}

function mount(root, data, opts = {}) {
  const layers = [...new Set(data.passes.map((pass) => pass.layer))];
  let layer = opts.state?.layer ?? layers[0];
  const picker = h("select", { "aria-label": "Layer", onchange: () => show(Number(picker.value)) }, layers.map((number) => h("option", { value: number }, `layer ${number}`)));
  const legend = h("span", { class: "mc-bar" }, Array.from({ length: data.ranks }, (_, rank) => h("span", { class: "tt-legend" }, h("i", { style: `background:${rankColour(rank)}` }), `rank ${rank}`)));
  const detail = h("p", { class: "tt-detail", "aria-live": "polite" });
  const texts = h("div", { class: "tt-texts" });
  root.classList.add("moe-course", "token-text");
  root.replaceChildren(h("div", { class: "mc-bar" }, h("label", {}, "where its routes went in ", picker), legend), texts, detail);

  function chip(token) {
    const bar = h("span", { class: "tt-bar", "aria-hidden": "true" }, token.shares.map((share, rank) => (share > 0 ? h("i", { style: `flex:${share};background:${rankColour(rank)}` }) : null)));
    const main = mainRank(token.shares);
    const button = h("button", { class: token.made ? "tt-token tt-made" : "tt-token", tabindex: -1, title: describeToken(data, token) }, h("code", {}, token.text), bar,
      h("small", {}, h("span", { class: "mc-hidden" }, token.routes.length ? " rank " : " no rank "), token.routes.length ? String(main) : "·"));
    button.addEventListener("click", () => choose(button, token));
    button.addEventListener("focus", () => say(detail, describeToken(data, token)));
    return button;
  }

  function choose(button, token) {
    for (const other of texts.querySelectorAll("[aria-pressed]")) other.removeAttribute("aria-pressed");
    button.setAttribute("aria-pressed", "true");
    say(detail, describeToken(data, token));
    const pass = data.passes[token.pass];
    const state = { step: pass.step, layer: pass.layer, token: token.index };
    opts.onState?.(state);
    root.dispatchEvent(new CustomEvent("moe-state", { detail: state, bubbles: true })); // for a page with several pictures
  }

  function show(number) {
    layer = number;
    picker.value = String(number);
    root.dataset.layer = String(number);
    texts.replaceChildren(
      ...tokenShares(data, layer).map((tokens, prompt) => {
        const from = data.prompts[prompt].length;
        const chips = tokens.map((token) => chip({ ...token, made: token.position >= from }));
        if (chips.length) chips[0].tabIndex = 0;
        const line = h("div", { class: "tt-line", role: "toolbar", "aria-label": `tokens of prompt ${prompt}` }, chips);
        line.addEventListener("keydown", (event) => walk(event, chips));
        return h("section", {}, h("h3", {}, `prompt ${prompt}, on rank ${data.prompts[prompt].rank}`), line);
      }),
    );
  }

  // arrows go from token to token, as in a toolbar: one stop of the Tab key for each prompt
  function walk(event, chips) {
    const at = chips.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: chips.length - 1 }[event.key];
    if (to === undefined || !chips[to]) return;
    event.preventDefault();
    event.stopPropagation();
    chips[at].tabIndex = -1;
    chips[to].tabIndex = 0;
    chips[to].focus();
  }

  show(layer);
  return {
    set: (state) => state.layer !== undefined && layers.includes(state.layer) && show(state.layer),
    get: () => ({ layer }),
    destroy: () => root.replaceChildren(),
  };
}

export { mount, tokenShares, mainRank };
export default adapter(mount);
