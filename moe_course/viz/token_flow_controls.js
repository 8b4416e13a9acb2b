// The elements of the player: buttons, lists, canvases, legend. What they do is said by whoever makes them.

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => h("option", { value }, String(text))));
}

function controlsOf(data, does) {
  const button = (text, f, more) => h("button", { type: "button", onclick: f, ...more }, text);
  const pick = (label, name, more) => h("select", { "aria-label": label, onchange: (event) => does.set({ [name]: event.target.value === "" ? null : Number(event.target.value), ...more }) });
  const labelled = (text, element) => h("label", {}, text, element);
  const play = button("▶ Play", does.toggle, { class: "mc-play" });
  const scrub = h("input", { type: "range", min: 0, max: END, step: 0.01, value: 0, "aria-label": "Time in this layer", oninput: () => does.goTo(Number(scrub.value)), onchange: does.tell });
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
  const keys = "Space plays and pauses, left and right step through the phases, up and down choose a token, Escape lets it go.";
  const stage = h("div", { class: "mc-stage", tabindex: 0, role: "group", "aria-label": `Player. ${keys}` }, below, above);
  const table = h("div", { class: "mc-scroll", tabindex: 0, role: "region", "aria-label": "Routes as a table", hidden: true });
  const counts = [h("span"), h("span")];
  const details = h("div", { class: "mc-details" });
  const live = h("p", { class: "mc-quiet", "aria-live": "polite" });
  const [most, dots] = [h("span"), h("span")];
  const scale = h("span", { class: "mc-scale", style: `background:linear-gradient(90deg,${CIVIDIS.join(",")})`, "aria-hidden": "true" });
  const legend = h("div", { class: "mc-legend mc-quiet" },
    ["colour: the rank a row comes from", "● travels", "■ stays on its rank"].map((text) => h("span", {}, text)),
    data.shape === "allgather_reducescatter" ? h("span", {}, "○ travels, but no expert there needs it") : null,
    data.capacity ? h("span", {}, "▨ empty places of the padded buffer") : null,
    h("span", {}, "expert: 1 route", scale, most), dots);
  const over = data.transport === "threads" ? "" : ` (over ${data.transport})`;
  const box = h("div", {},
    h("div", { class: "mc-bar" }, play, scrub, labelled("speed", speed), h("label", {}, on, "all steps"), asTable),
    h("div", { class: "mc-bar mc-phases", role: "group", "aria-label": "Phase" }, chips),
    h("div", { class: "mc-bar" }, labelled("step", step), labelled("layer", layer), labelled("token", token), labelled("only rank", rank), labelled("only expert", expert)),
    h("p", { class: "mc-quiet mc-travel" }, h("b", {}, data.backend), `: ${TRAVEL[data.shape]}${over}.`),
    stage, table, h("p", { class: "mc-counts", "aria-hidden": "true" }, counts), legend, live, details);
  return { play, scrub, speed, on, asTable, chips, step, layer, token, rank, expert, below, above, stage, table, counts, details, live, most, dots, legend, box };
}
