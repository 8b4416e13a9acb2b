// Everything that a choice of pass, token, rank and expert settles, so that a frame has only to draw.

function sceneOf(data, model, state, { width, colours, chosen, visible }) {
  const g = layout(data, model, width);
  const chosenMark = new Uint8Array(model.tokens.length);
  for (const i of chosen) chosenMark[i] = 1;
  const shownLoad = new Int32Array(data.ranks);
  const shownOfExpert = new Int32Array(data.experts);
  for (let i = 0; i < model.n; i++) {
    if (!visible(i)) continue;
    shownLoad[model.owner[i]] += 1;
    shownOfExpert[model.expert[i]] += 1;
  }
  const routes = chosen.flatMap((i) => model.routesOf[i]).filter(visible);
  const groups = groupsOf(data, model, g, visible);
  const ink = (colour) => (inkOn(colour) === "#ffffff" ? 1 : 0);
  const texts = new Map();
  let done = null;
  return {
    data, model, g, colours, chosen, chosenMark, shownLoad, visible, rank: state.rank, expert: state.expert, groups,
    there: wireTotals(data, model.pass.wire.dispatch, data.row_bytes),
    home: wireTotals(data, model.pass.wire.combine, data.partial_bytes),
    // what is counted as it arrives: groups of each direction, shares by rank, rows by rank, rows in all
    counting: [groups.filter((part) => part.begin >= 1 && part.end <= 1.72), groups.filter((part) => part.begin >= 3.28)],
    share: new Float32Array(data.ranks), all: new Float32Array(data.ranks), into: new Int32Array(data.ranks), arrived: [0, 0], told: [-1, -1],
    lit: litSheet(model, g, shownOfExpert),
    done: () => (done ??= doneSheet(model, g, visible, chosenMark, chosen.length > 0)),
    paths: pathsOf(data, model, g, routes), labels: labelsOf(model, g, routes),
    glyphs: model.tokens.length <= 400 ? glyphSheet(model.tokens) : null,
    dots: { small: dotSheet(data.ranks, DOT, colours), large: dotSheet(data.ranks, GLYPH, colours) },
    inks: Array.from({ length: data.ranks }, (_, r) => ink(rankColour(r))), plainInk: ink(colours.background),
    plainFont: "12px ui-sans-serif, system-ui, sans-serif", boldFont: "bold 12px ui-sans-serif, system-ui, sans-serif",
    loadTexts: Array.from(model.load, (n, r) => `${shownLoad[r] === n ? "" : `${whole(shownLoad[r])} of `}${whole(n)}${n === model.mostLoad ? " ◀ busiest" : ""}`),
    countText(n) {
      if (!texts.has(n)) texts.set(n, `${counted(n, "row")} in`);
      return texts.get(n);
    },
  };
}
