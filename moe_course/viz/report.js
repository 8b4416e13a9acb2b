// Text and player show one choice: what is chosen in one of them is chosen in the other, with all ranks and experts in
// view, and the player goes on to where its experts are seen. Pictures are there once all modules have run.
addEventListener("load", () => {
  const [text, player] = ["token_text", "token_flow"].map((name) => document.querySelector(`[data-picture="${name}"]`));
  const follow = () => {
    const { step, layer, token } = player.dataset;
    text.picture.set({ step: Number(step), layer: Number(layer), token: token === "" ? null : Number(token) });
  };
  text.addEventListener("moe-state", ({ detail }) => {
    const [chosen, { phase }] = ["token" in detail, player.picture.get()];
    const some = chosen && detail.token !== null;
    const seen = some && ["at source", "router", "dispatch"].includes(phase) ? { phase: "experts" } : {};
    player.picture.set(chosen ? { rank: null, expert: null, ...seen, ...detail } : detail);
    follow(); // the player may know better: it has not every layer of every step
    if (!some) return;
    player.scrollIntoView({ block: "nearest" });
    player.querySelector(".mc-details > *")?.scrollIntoView({ block: "nearest" }); // where the player is higher than the window
  });
  new MutationObserver(follow).observe(player, { attributes: true, attributeFilter: ["data-step", "data-layer", "data-token"] });
});

// One canvas for those of the player, which lie on each other: printed, the upper one would hide what is below.
function flattened(sheets) {
  const drawn = [...sheets.querySelectorAll("canvas")].filter((canvas) => canvas.width && canvas.height && !canvas.hidden);
  if (!drawn.length) return [];
  const paper = document.createElement("canvas");
  paper.className = "paper";
  [paper.width, paper.height, paper.style.width] = [drawn[0].width, drawn[0].height, drawn[0].style.width];
  for (const canvas of drawn) paper.getContext("2d").drawImage(canvas, 0, 0);
  sheets.append(paper);
  return [paper];
}

// Paper is white: printed are light pictures, and what is folded is opened. Afterwards all is as before.
let unprint = () => {};
addEventListener("beforeprint", () => {
  const page = document.documentElement;
  const [theme, folded] = [page.dataset.theme, [...document.querySelectorAll("details:not([open])")]];
  let papers = [];
  page.dataset.theme = "light";
  for (const details of folded) details.open = true;
  queueMicrotask(() => { papers = [...document.querySelectorAll(".mc-sheets")].flatMap(flattened); }); // the player has been drawn anew
  unprint = () => {
    if (theme === undefined) delete page.dataset.theme;
    else page.dataset.theme = theme;
    for (const details of folded) details.open = false;
    for (const paper of papers) paper.remove();
    unprint = () => {};
  };
});
addEventListener("afterprint", () => unprint());
