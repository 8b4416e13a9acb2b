// Everything that a choice of pass, token, rank and expert settles, so that a frame has only to draw.

function sceneOf(data, model, state, { width, colours, chosen, visible }) {
  const chosenMark = new Uint8Array(model.tokens.length);
  for (const i of chosen) chosenMark[i] = 1;
  const g = Object.assign(layout(data, model, width), { chosen: chosenMark });
  const everything = [wireTotals(data, model.pass.wire.dispatch, data.row_bytes), wireTotals(data, model.pass.wire.combine, data.partial_bytes)];
  const shownLoad = new Int32Array(data.ranks);
  const shownOfExpert = new Int32Array(data.experts);
  for (let i = 0; i < model.n; i++) {
    if (!visible(i)) continue;
    shownLoad[model.owner[i]] += 1;
    shownOfExpert[model.expert[i]] += 1;
  }
  const all = shownLoad.every((n, r) => n === model.load[r]);
  const { there, home } = all ? {} : travelling(data, model, visible);
  const routes = chosen.flatMap((i) => model.routesOf[i]).filter(visible);
  const labels = labelsOf(model, g, routes);
  const groups = groupsOf(data, model, g, visible, berthsOf(labels));
  const ink = (colour) => (inkOn(colour) === "#ffffff" ? 1 : 0);
  const kept = (make) => {
    const texts = new Map();
    return (n) => texts.get(n) ?? texts.set(n, make(n)).get(n);
  };
  const counting = [[1, 1.72], [3.28, 4]].map(([begin, end]) => ({ begin, end, groups: groups.filter((part) => part.begin >= begin && part.end <= end) }));
  const scene = {
    data, model, g, colours, chosen, chosenMark, shownLoad, visible, rank: state.rank, expert: state.expert, groups,
    // rows of each direction, those shown and all; what is counted as it arrives: groups, shares by rank, rows by rank, rows in all
    totals: all ? everything : [shownTotals(data, there, data.row_bytes), shownTotals(data, home, data.partial_bytes)], everything, counting,
    share: new Float32Array(data.ranks), all: new Float32Array(data.ranks), into: new Int32Array(data.ranks), arrived: [0, 0], told: [-1, -1],
    paths: pathsOf(data, model, g, routes), labels, badges: chosen.length ? badgeSheet(data.ranks, model.tokens[chosen[0]].text, colours) : null,
    glyphs: model.tokens.length <= 400 ? glyphSheet(model.tokens) : null,
    dots: { small: dotSheet(data.ranks, DOT, colours), large: dotSheet(data.ranks, GLYPH, colours) },
    inks: Array.from({ length: data.ranks }, (_, r) => ink(rankColour(r))), plainInk: ink(colours.background),
    plainFont: "12px ui-sans-serif, system-ui, sans-serif", boldFont: "bold 12px ui-sans-serif, system-ui, sans-serif",
    loadTexts: Array.from(model.load, (n, r) => `${shownLoad[r] === n ? "" : `${whole(shownLoad[r])} of `}${whole(n)}${n === model.mostLoad ? " ◀ busiest" : ""}`),
    numberText: kept(whole),
    // what has come from other ranks: rows to compute, then parts of its own tokens' sums
    arrivedText: [["row", "in"], ["part", "back"]].map(([noun, way]) => kept((n) => (all ? `${g.narrow ? whole(n) : counted(n, noun)} ${way}` : `${whole(n)} shown${g.narrow ? "" : ` ${way}`}`))),
  };
  // sheets are made when they are first shown
  const make = { lit: () => litSheet(model, g, colours, shownOfExpert), rest: () => restSheet(scene), tokens: () => tokenSheet(scene, false), done: () => tokenSheet(scene, true) };
  const sheets = {};
  scene.sheet = (name) => (sheets[name] ??= make[name]());
  return scene;
}
