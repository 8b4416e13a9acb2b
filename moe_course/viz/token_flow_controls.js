// The elements of the player: buttons, lists, canvases, legend. What they do is said by whoever makes them.

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => h("option", { value }, String(text))));
}

function controlsOf(data, does) {
  const button = (text, f, more) => h("button", { type: "button", onclick: f, ...more }, text);
  const pick = (label, name, more) => h("select", { "aria-label": label, onchange: (event) => does.set({ [name]: event.target.value === "" ? null : Number(event.target.value), ...more }) });
  const labelled = (text, element) => h("label", {}, text, element);
  const play = button("▶ Play", does.toggle, { class: "mc-play" });
  const scrub = h("input", { type: "range", min: 0, max: PHASES.length - 1, step: 0.01, value: 0, "aria-label": "Time in this layer", oninput: () => does.goTo(timeAt(data, Number(scrub.value))), onchange: does.tell });
  const speed = h("select", { "aria-label": "Speed" });
  options(speed, [["0.5", "0.5×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]]);
  speed.value = "1";
  const on = h("input", { type: "checkbox" });
  const asTable = button("as table", does.swap, { "aria-pressed": "false" });
  const chips = PHASES.map((name, i) => button(name, () => { does.goTo(stopsOf(data)[i]); does.tell(); }, { class: "mc-phase" }));
  const [step, layer, token] = [pick("Step", "step", { token: null }), pick("Layer", "layer"), pick("Token", "token")];
  const [rank, expert] = [pick("Only rank", "rank"), pick("Only expert", "expert")];
  const below = h("canvas", { "aria-hidden": "true" });
  const above = h("canvas", { role: "img", onclick: does.choose, onpointermove: does.hover });
  const names = h("canvas", { class: "mc-names", "aria-hidden": "true" });
  const keys = "Space plays and pauses, left and right step through the phases, up and down choose a token, Escape lets it go.";
  const sheets = h("div", { class: "mc-sheets" }, below, above, names);
  const stage = h("div", { class: "mc-stage", tabindex: 0, role: "group", "aria-label": `Player. ${keys}` }, sheets);
  const filter = h("p", { class: "mc-filter" });
  const table = h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Routes as a table", hidden: true });
  const counts = [h("span"), h("span")];
  const details = h("div", { class: "mc-details" });
  const live = h("p", { class: "mc-quiet", "aria-live": "polite" });
  const [most, dots, scale] = [h("span"), h("span"), h("span", { class: "mc-scale", "aria-hidden": "true" })];
  const legend = legendOf(data, most, dots, scale);
  const over = data.transport === "threads" ? "" : ` (over ${data.transport})`;
  const box = h("div", {},
    h("div", { class: "mc-bar" }, play, labelled("speed", speed), h("label", {}, on, "all steps"), labelled("step", step), labelled("layer", layer), labelled("token", token),
      labelled("only rank", rank), labelled("only expert", expert), asTable),
    h("div", { class: "mc-time" }, scrub, h("div", { class: "mc-phases", role: "group", "aria-label": "Phase" }, chips)),
    h("p", { class: "mc-quiet mc-travel" }, h("b", {}, data.backend), `: ${TRAVEL[data.shape]}${over}. ${wordsOf(data)}`),
    filter, stage, table, h("p", { class: `mc-counts${data.capacity ? " mc-long" : ""}`, "aria-hidden": "true" }, counts),
    data.after ? h("p", { class: "mc-quiet mc-after" }, AFTER[data.after]) : null, legend, live, details);
  return { play, scrub, speed, on, asTable, chips, step, layer, token, rank, expert, below, above, names, sheets, stage, filter, table, counts, details, live, most, dots, scale, legend, box };
}

// What colours, shapes and lines mean.
function legendOf(data, most, dots, scale) {
  const swatch = (look, style) => h("span", { class: `mc-swatch ${look}`, "aria-hidden": "true", style });
  const entry = (...parts) => h("span", {}, ...parts);
  const ifFiltered = (text) => h("span", { class: "mc-if-filtered" }, text);
  const stripes = COLOURS.slice(0, Math.max(2, Math.min(4, data.ranks))).map((colour, i, all) => `${colour} ${(100 * i) / all.length}% ${(100 * (i + 1)) / all.length}%`);
  return h("div", { class: "mc-legend mc-quiet" },
    entry("dot: a row, in the colour of the rank it comes from (on the way home: the rank that computed it)"),
    entry("● travels"), entry("■ stays on its rank"),
    data.shape === "allgather_reducescatter" ? entry("○ travels although no expert there needs it; comes home with nothing to add (zeros)") : null,
    data.capacity ? entry("▨ empty places of the padded buffer") : null,
    entry(swatch("mc-line"), "route of the chosen token: colour = the rank it goes to, width = weight"),
    entry(swatch("mc-line mc-dashed"), "stays at home"),
    entry("expert: ", swatch("mc-none"), "0 ", ifFiltered("shown "), "routes (empty), ", "1", scale, most),
    entry("dots in an expert: its rows, as many as fit"),
    entry(swatch("mc-sum", `background:linear-gradient(90deg,${stripes.join(",")})`), "under a token, done: its new row is the sum of the parts from these ranks", ifFiltered(" (pale: parts of routes that are left out)")),
    data.passes.some((pass) => pass.tokens.some((token) => token.text === "·start")) ? entry(h("b", {}, "·"), " start of a text") : null, dots);
}
