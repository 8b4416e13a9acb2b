// The five stages in a row. Each is a button that says what goes in and out. Data: schema moe_course.ribbon/1.

// A line breaks behind a comma first, but not in a shape: "rows that came, | ids [T, K]".
const phrases = (text) => text.split(/(?<=,) (?![^[]*\])/).flatMap((part, i) => [i ? " " : "", h("span", {}, part)]);

function mount(root, data, opts = {}) {
  let open = opts.state?.stage ?? null;
  const says = h("p", { class: "mc-says" });
  const where = h("p", { class: "mc-quiet" });
  const buttons = data.stages.map((stage, i) => {
    const lit = data.lit === null || data.lit === stage.name;
    return h("button", { type: "button", class: `mc-stage${lit ? " mc-lit" : ""}`, onclick: () => choose(open === stage.name ? null : stage.name) },
      h("span", { class: "mc-number", "aria-hidden": "true" }, String(i + 1)), h("b", {}, stage.name),
      h("span", { class: "mc-io" }, phrases(stage.in)), h("span", { class: "mc-io" }, phrases(`→ ${stage.out}`)));
  });
  const row = h("div", { class: "mc-row", role: "group", "aria-label": "The five stages of a sparse layer" },
    buttons.flatMap((button, i) => (i ? [h("span", { class: "mc-arrow", "aria-hidden": "true" }, "➜"), button] : [button])));
  const order = h("div", { class: "mc-order mc-quiet", "aria-hidden": "true" },
    h("span", { class: "mc-home" }, "rows in source order"), h("span", { class: "mc-way" }, "they travel ➜"), h("span", { class: "mc-owner" }, "owner order"), h("span", { class: "mc-way" }, "they travel home ➜"));
  const note = h("div", { class: "mc-note", "aria-live": "polite" }, says, where);
  root.classList.add("moe-course", "mc-ribbon");
  ownKeys(root);
  root.addEventListener("keydown", key);
  root.append(row, order, note);

  function choose(name, tell = true) {
    open = data.stages.some((stage) => stage.name === name) ? name : null;
    const stage = data.stages.find((one) => one.name === open);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(data.stages[i] === stage)));
    say(says, stage ? `${stage.name}: ${stage.says} (${stage.order})` : "Press a stage to read what goes in and what comes out.");
    where.replaceChildren(...(stage ? ["here ", h("code", {}, stage.file), " · in vLLM ", h("code", {}, stage.vllm)] : []));
    root.dataset.stage = open ?? "";
    if (tell) opts.onState?.({ stage: open });
  }

  function key(event) {
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || (to === undefined && ![" ", "Enter"].includes(event.key))) return;
    event.stopPropagation();
    if (to === undefined) return;
    event.preventDefault();
    buttons[Math.min(buttons.length - 1, Math.max(0, to))].focus();
  }

  choose(open, false);
  return {
    set(wanted) {
      const there = wanted.stage === null || data.stages.some((stage) => stage.name === wanted.stage);
      if (there) choose(wanted.stage, false);
    },
    get: () => ({ stage: open }),
    destroy() {
      root.removeEventListener("keydown", key);
      root.replaceChildren();
    },
  };
}

export { mount };
export default adapter(mount);
